"""The kernels for a few tokens against float64, fresh random inputs. Needs a Hopper GPU and nvcc."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from on_hopper import NEEDS_HOPPER, dense, distance, routed
from torch import Tensor

from kimi_k2.bench.kernels.expert_formats import random_fp8, random_routing
from kimi_k2.kernels.attention.value_rows import batched_value_rows, value_rows
from kimi_k2.kernels.experts.fp8_decode import moe_decode
from kimi_k2.kernels.linear.fused_linear import fused_add_linear

pytestmark = NEEDS_HOPPER


def expert(x: Tensor, weights: tuple[Tensor, ...]) -> Tensor:
    gate, up = (x @ dense(weights[0], weights[1]).T).chunk(2, -1)
    return (F.silu(gate) * up) @ dense(weights[2], weights[3]).T


@pytest.mark.parametrize(("tokens", "top_k"), [(1, 8), (2, 8), (4, 8), (8, 8), (3, 1), (1, 16)])
@pytest.mark.parametrize(("hidden", "inter"), [(1024, 128), (1024, 640), (7168, 256), (7168, 2048)])
@pytest.mark.parametrize("with_shared", [True, False])
def test_experts(tokens: int, top_k: int, hidden: int, inter: int, with_shared: bool) -> None:
    weights, shared = random_fp8(20, inter, hidden), random_fp8(1, inter, hidden)
    indices, scores = random_routing(tokens, top_k, 20)
    if tokens > 2:
        indices[1, 0], scores[tokens - 1] = -1, 0.0  # an invalid pair, and a padded token
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    extra = tuple(w[0] for w in shared) if with_shared else ()
    wanted = routed(x, indices, scores, lambda rows, chosen: expert(rows, tuple(w[chosen] for w in weights)))
    if with_shared:
        wanted += expert(x.double(), extra)
    out = moe_decode(x, *weights, indices, scores, None, *extra)
    # Rounding the result to bfloat16 alone gives 1.7e-3.
    assert distance(out, wanted) < 2.5e-3
    assert torch.equal(out, moe_decode(x, *weights, indices.int(), scores, None, *extra))
    if tokens > 2 and not with_shared:
        assert not out[tokens - 1].any()


@pytest.mark.parametrize(("rows", "columns"), [
    (2112, 7168), (576, 7168), (1536, 1536), (7170, 1024), (512, 2048), (72, 256), (64, 512), (7168, 2304),
    (7168, 4096),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 6, 8, 9])
@pytest.mark.parametrize("fp8", [True, False])
def test_residual_norm_and_product(rows: int, columns: int, tokens: int, fp8: bool) -> None:
    x, delta = (torch.randn(tokens, columns, device="cuda").bfloat16() for _ in range(2))
    weight, scale = torch.randn(rows, columns, device="cuda") * 20, None
    if fp8:
        scale = torch.rand(-(-rows // 128), columns // 128, device="cuda") * 0.01 + 0.01
    weight = weight.to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    norm = torch.rand(columns, device="cuda").bfloat16() + 0.5
    out, total = fused_add_linear(x, delta, weight, scale, norm, 1e-6)
    assert torch.equal(total, x + delta)
    wide = total.double()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    assert distance(out, wanted @ (weight.double() if scale is None else dense(weight, scale)).T) < 5e-3


@pytest.mark.parametrize(("tokens", "heads"), [(1, 8), (3, 8), (8, 64)])
def test_value_rows(tokens: int, heads: int) -> None:
    latent = torch.randn(tokens, heads, 512, device="cuda").bfloat16()
    w_uv = torch.randn(heads, 128, 512, device="cuda").bfloat16()
    wanted = torch.einsum("bhr,hvr->bhv", latent.double(), w_uv.double()).flatten(1)
    assert distance(value_rows(latent, w_uv), wanted) < 2.5e-3
    assert distance(batched_value_rows(latent, w_uv), wanted) < 2.5e-3
