"""Drawn batches of the kernel benchmark."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_k2.bench.kernels.mla_cases import Inputs, paged_case, reference
from kimi_k2.bench.kernels.mla_drawn import BATCHES, HEADS, MOST, MOST_ROWS, drawn_cases
from kimi_k2.bench.kernels.mla_peers import Scheduled, check
from kimi_k2.errors import KernelError


def test_a_seed_gives_the_same_cases_and_all_kinds() -> None:
    cases = drawn_cases(300, 7)
    assert cases == drawn_cases(300, 7) != drawn_cases(300, 8)
    assert {len(case.lengths) for case in cases} == set(BATCHES) and {case.heads for case in cases} == set(HEADS)
    assert {case.kind for case in cases} == {"equal", "uniform", "lognormal", "few long"}
    assert all(1 <= length <= MOST for case in cases for length in case.lengths)
    assert all(sum(case.lengths) <= MOST_ROWS for case in cases)
    assert {case.fp8 for case in cases} == {False, True} and max(max(case.lengths) for case in cases) > MOST // 2
    assert "e4m3" in next(case.name for case in cases if case.fp8)


def test_a_peer_that_computes_something_else_is_refused() -> None:
    q, rows, cache, table, lengths = paged_case([5, 70], 8, 128, device="cpu")
    wanted = reference(q, rows, [5, 70])

    class Peer(Scheduled):
        query_dtype = torch.float8_e4m3fn
        error = 0.1

        def plan(self, one: Inputs) -> Any:
            return one.seq_lens.tolist()

        def run(self, one: Inputs, plan: Any) -> Tensor:
            assert one.q.dtype == self.query_dtype
            return reference(one.q, rows, plan).bfloat16()

    one = Inputs(q, cache, lengths, table)
    check("peer", Peer(), one, wanted)
    with pytest.raises(KernelError, match=r"peer: .* from ours, expected below 0.1"):
        check("peer", Peer(), one, wanted.roll(1, 0))
