"""The gate that the benchmark gives torch.compile."""

from __future__ import annotations

import torch

from kimi_k2.bench.kernels.gate import plain_gate, random_logits
from kimi_k2.ops.experts import noaux_tc_gate


def test_benchmark_compares_the_same_operation() -> None:
    logits, bias = random_logits(50, 384, device="cpu")
    wanted = noaux_tc_gate(logits, bias, 8, routed_scaling_factor=2.827)
    got = plain_gate(logits, bias)
    assert torch.equal(got[0].long(), wanted[0])
    torch.testing.assert_close(got[1], wanted[1])
