"""What a machine without a GPU can hold of the gate and router kernels: refusals, fake operations, choices, the ABI."""

from __future__ import annotations

import torch

from kimi_k2.bench.kernels.gate import plain_gate, random_logits
from kimi_k2.kernels.router import gate as fused_gate
from kimi_k2.ops.experts import noaux_tc_gate


def test_strategy_follows_tokens_and_experts() -> None:
    chosen = {(t, e): fused_gate.use_packed(t, e, "auto") for t in (1, 64, 65536) for e in (256, 384, 512)}
    assert {shape for shape, packed in chosen.items() if packed} == {(65536, 256), (65536, 384)}
    assert not fused_gate.use_packed(65536, 384, "warp")
    assert fused_gate.use_packed(1, 384, "packed")


def test_benchmark_compares_the_same_operation() -> None:
    logits, bias = random_logits(50, 384, device="cpu")
    wanted = noaux_tc_gate(logits, bias, 8, routed_scaling_factor=2.827)
    got = plain_gate(logits, bias)
    assert torch.equal(got[0].long(), wanted[0])
    torch.testing.assert_close(got[1], wanted[1])
