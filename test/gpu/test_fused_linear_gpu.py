"""Products for few tokens on a GPU against float64, fresh random inputs."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.kernels.linear.fused_linear import fused_linear

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
