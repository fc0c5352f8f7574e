"""Drawn batches of the kernel benchmark."""

from __future__ import annotations

import pytest
import torch
from paged import paged_case, reference
from torch import Tensor

from kimi_k2.bench.kernels.mla import DRAWN_BATCHES, DRAWN_HEADS, DRAWN_LONGEST, DRAWN_ROWS, drawn
from kimi_k2.bench.kernels.mla_peers import Inputs, Kernel, check
from kimi_k2.errors import KernelError


def test_a_seed_gives_the_same_cases_and_all_kinds() -> None:
    cases = drawn(300, 7)
    assert cases == drawn(300, 7) != drawn(300, 8)
    assert {len(case.lengths) for case in cases} == set(DRAWN_BATCHES) and {case.heads for case in cases} == set(
        DRAWN_HEADS
    )
    assert {case.kind for case in cases} == {"equal", "uniform", "lognormal", "few long"}
    assert all(1 <= length <= DRAWN_LONGEST for case in cases for length in case.lengths)
    assert all(sum(case.lengths) <= DRAWN_ROWS for case in cases)
    assert {case.fp8 for case in cases} == {False, True} and max(
        max(case.lengths) for case in cases
    ) > DRAWN_LONGEST // 2
    assert "e4m3" in next(case.name for case in cases if case.fp8)


def test_a_peer_that_computes_something_else_is_refused() -> None:
    q, rows, cache, table, lengths = paged_case([5, 70], 8, 128, device="cpu")
    wanted = reference(q, rows, [5, 70])

    def run(inputs: Inputs, plan: list[int]) -> Tensor:
        assert inputs.q.dtype == torch.float8_e4m3fn
        return reference(inputs.q, rows, plan).bfloat16()

    peer = Kernel("peer", lambda inputs: inputs.seq_lens.tolist(), run, torch.float8_e4m3fn, 0.1)
    inputs = Inputs(q, cache, lengths, table)
    check(peer, inputs, wanted)
    with pytest.raises(KernelError, match=r"peer: .* from ours, expected below 0.1"):
        check(peer, inputs, wanted.roll(1, 0))
