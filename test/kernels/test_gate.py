"""What a machine without a GPU can hold of the gate and router kernels: refusals, fake operations, choices, the ABI."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k2.bench.kernels.gate import plain_gate, random_logits
from kimi_k2.errors import KernelError
from kimi_k2.kernels.router import gate as fused_gate
from kimi_k2.kernels.router import router_gemm
from kimi_k2.ops.experts import noaux_tc_gate


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(3, 384, dtype=torch.bfloat16)}, "logits is torch.bfloat16"),
        ({"logits": torch.zeros(384, 3).t()}, "logits"),
        ({"logits": torch.zeros(3, 6), "e_score_correction_bias": torch.zeros(6), "top_k": 2}, "6 experts"),
        ({"logits": torch.zeros(3, 516), "e_score_correction_bias": torch.zeros(516)}, "516 experts"),
        ({"e_score_correction_bias": torch.zeros(384, dtype=torch.bfloat16)}, "e_score_correction_bias is"),
        ({"e_score_correction_bias": torch.zeros(256)}, "e_score_correction_bias is"),
        ({"top_k": 17}, "top_k 17"),
        ({"top_k": 0}, "top_k 0"),
        ({"index_dtype": torch.int16}, "index_dtype"),
        ({"num_valid": torch.zeros(1)}, "num_valid"),
        ({"strategy": "block"}, "strategy 'block'"),
        ({"warps": 9}, "warps 9"),
    ],
)
def test_bad_gate_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    good = {"logits": torch.zeros(3, 384), "e_score_correction_bias": torch.zeros(384), "top_k": 8}
    with FakeTensorMode() as mode:
        given = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in (good | changes).items()}
        with pytest.raises(KernelError, match=message):
            fused_gate.fused_gate(**given)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_fake_gate_has_the_plain_operations_shapes(index_dtype: torch.dtype) -> None:
    wanted = noaux_tc_gate(torch.randn(5, 384), torch.zeros(384), 8)
    with FakeTensorMode():
        got = fused_gate.fused_gate(torch.randn(5, 384), torch.zeros(384), 8, index_dtype=index_dtype)
    assert [t.shape for t in got] == [t.shape for t in wanted]
    assert [t.dtype for t in got] == [index_dtype, wanted[1].dtype]


def test_fake_router_and_its_refusals() -> None:
    bf16 = torch.bfloat16
    with FakeTensorMode():
        x, weight, bias = torch.zeros(4, 7168, dtype=bf16), torch.zeros(384, 7168, dtype=bf16), torch.zeros(384)
        logits = router_gemm.router_gemm(x, weight)
        assert (logits.shape, logits.dtype) == ((4, 384), torch.float32)
        indices, weights = router_gemm.router_decode(x, weight, bias, 8)
        assert (indices.shape, indices.dtype, weights.dtype) == ((4, 8), torch.int64, torch.float32)
        with pytest.raises(KernelError, match=r"x is torch\.float32"):
            router_gemm.router_gemm(x.float(), weight)
        with pytest.raises(KernelError, match="multiple of 256"):
            router_gemm.router_gemm(x[:, :100].contiguous(), weight[:, :100].contiguous())
        with pytest.raises(KernelError, match="65 tokens"):
            router_gemm.router_decode(torch.zeros(65, 7168, dtype=bf16), weight, bias, 8)
        with pytest.raises(KernelError, match="launches 3"):
            router_gemm.router_decode(x, weight, bias, 8, launches=3)
        with pytest.raises(KernelError, match="e_score_correction_bias"):
            router_gemm.router_decode(x, weight, bias[:8], 8)


def test_cpu_tensors_are_left_to_the_plain_operation() -> None:
    x, weight = torch.zeros(3, 512, dtype=torch.bfloat16), torch.zeros(64, 512, dtype=torch.bfloat16)
    assert not router_gemm.supports(x, weight)
    assert not router_gemm.supports_decode(x, weight, 8)


def test_strategy_follows_tokens_and_experts() -> None:
    chosen = {(t, e): fused_gate.use_packed(t, e, "auto") for t in (1, 64, 65536) for e in (256, 384, 512)}
    assert {shape for shape, packed in chosen.items() if packed} == {(65536, 256), (65536, 384)}
    assert not fused_gate.use_packed(65536, 384, "warp")
    assert fused_gate.use_packed(1, 384, "packed")


def test_one_launch_only_where_its_blocks_can_wait_for_each_other() -> None:
    assert router_gemm.all_resident(384, 132)
    assert not router_gemm.all_resident(384, 114)
    assert not router_gemm.all_resident(384, 60)


def test_benchmark_compares_the_same_operation() -> None:
    logits, bias = random_logits(50, 384, device="cpu")
    wanted = noaux_tc_gate(logits, bias, 8, routed_scaling_factor=2.827)
    got = plain_gate(logits, bias)
    assert torch.equal(got[0].long(), wanted[0])
    torch.testing.assert_close(got[1], wanted[1])
