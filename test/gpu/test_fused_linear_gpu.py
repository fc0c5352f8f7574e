"""Linears of few tokens on a GPU against float64, fresh random inputs."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.kernels.linear.fused_linear import fused_linear
from kimi_k2.ops.linear import Weight, add_project, float32_linear, project

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(("rows", "columns"), [(2112, 7168), (1536, 1536), (7168, 1024), (512, 7168), (7168, 256)])
@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("normed", [True, False])
def test_product(rows: int, columns: int, tokens: int, fp8: bool, normed: bool) -> None:
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    weight, scale = torch.randn(rows, columns, device="cuda").bfloat16() * 0.02, None
    wanted_weight = weight.double()
    if fp8:
        scale = torch.rand(-(-rows // 128), columns // 128, device="cuda") * 0.01 + 0.01
        weight = (weight * 1000).to(torch.float8_e4m3fn)
        wide = scale.double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
        wanted_weight = weight.double() * wide
    norm = torch.rand(columns, device="cuda").bfloat16() + 0.5 if normed else None
    wanted = x.double()
    if norm is not None:
        wanted = wanted * (wanted.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    wanted = wanted @ wanted_weight.T
    out = fused_linear(x, weight, scale, norm)
    assert (out.double() - wanted).norm() / wanted.norm() < 5e-3
    assert torch.equal(out, fused_linear(x, weight, scale, norm))


@pytest.mark.parametrize(("rows", "columns"), [(2112, 7168), (1536, 1536), (7168, 1024), (20480, 7168)])
@pytest.mark.parametrize("tokens", [1, 2, 4, 16, 17, 64, 65])
def test_bf16_behind_norm_and_residual_sum(rows: int, columns: int, tokens: int) -> None:
    """Those that `dense_gemm` takes outside of batch-invariant mode, and the ones next to them."""
    weight = Weight({"weight": torch.randn(rows, columns, device="cuda").bfloat16() * 0.02})
    wide = torch.randn(tokens, columns + 64, device="cuda").bfloat16()
    x, norm = wide[:, 64:], torch.rand(columns, device="cuda").bfloat16() + 0.5
    delta, exact = torch.randn(tokens, columns, device="cuda").bfloat16(), weight.tensors["weight"].double().T

    def normed(value: torch.Tensor) -> torch.Tensor:
        return value.double() * (value.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()

    def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
        # Tokens and results are rounded to BF16 once each, 2.35e-3; the sum, too: 2.87e-3.
        assert (found.double() - wanted).norm() / wanted.norm() < 2.6e-3

    few = 1 < tokens < 17 or (1 < tokens < 65 and rows < 20480)
    given, whole = (x, weight, norm, 1e-6), x.contiguous()
    assert (project.choose(*given).name == "dense_gemm") == few
    check(project(*given), normed(x) @ exact)
    check(project(whole, weight), whole.double() @ exact)
    assert (add_project.choose(whole, delta, weight, norm, 1e-6).name == "dense_gemm") == few
    out, total = add_project(whole, delta, weight, norm, 1e-6)
    assert torch.equal(total, whole + delta)
    check(out, normed(whole.double() + delta.double()) @ exact)


@pytest.mark.parametrize("tokens", [1, 2, 16, 17, 65])
def test_logits_are_not_rounded(tokens: int) -> None:
    """Sums in float32 of the products of BF16 values, which rounding to BF16 would move by 1.65e-3."""
    x, weight = (torch.randn(size, 7168, device="cuda").bfloat16() for size in (tokens, 20480))
    found, wanted = float32_linear(x, weight), x.double() @ weight.double().T
    assert found.dtype == torch.float32
    assert (found.double() - wanted).norm() / wanted.norm() < 1e-4
    few = tokens < 65
    assert (float32_linear.choose(x, weight).name == "dense_gemm") == few
    assert not few or torch.equal(found[-1:], float32_linear(x[-1:], weight))  # however many are with it
