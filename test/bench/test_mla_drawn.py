"""Drawn batches of the kernel benchmark."""

from __future__ import annotations

from kimi_k2.bench.kernels.mla_drawn import BATCHES, HEADS, MOST, MOST_ROWS, drawn_cases


def test_a_seed_gives_the_same_cases_and_all_kinds() -> None:
    cases = drawn_cases(300, 7)
    assert cases == drawn_cases(300, 7) != drawn_cases(300, 8)
    assert {len(case.lengths) for case in cases} == set(BATCHES) and {case.heads for case in cases} == set(HEADS)
    assert {case.kind for case in cases} == {"equal", "uniform", "lognormal", "few long"}
    assert all(1 <= length <= MOST for case in cases for length in case.lengths)
    assert all(sum(case.lengths) <= MOST_ROWS for case in cases)
    assert {case.fp8 for case in cases} == {False, True} and max(max(case.lengths) for case in cases) > MOST // 2
    assert "e4m3" in next(case.name for case in cases if case.fp8)
