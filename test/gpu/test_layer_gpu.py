"""What lies between attention's products, on a GPU against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_k2.kernels.rope_cache import absorb_and_store, add_norm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Complex product of each pair, in float64."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())).flatten(-2)


@pytest.mark.parametrize("heads", [8, 64])
def test_query_and_cache_entry(heads: int) -> None:
    q, kv_a, w_uk = random(3, heads * 192), random(3, 2112)[:, 1536:], random(heads, 128, 512) * 0.05
    cache, norm, cos, sin = random(3, 70, 576), random(512), random(3, 32), random(3, 32)
    positions, before = torch.tensor([5, 69, -1], device="cuda"), cache.double()
    query = absorb_and_store(q, kv_a, norm, cos, sin, positions, w_uk, cache, 1e-6)
    nope, rope = q.view(3, heads, 192).split([128, 64], dim=-1)
    latent = torch.einsum("bhn,hnr->bhr", nope.double(), w_uk.double())
    wanted = torch.cat((latent, turned(rope, cos[:, None], sin[:, None])), dim=-1)
    assert (query.double() - wanted).norm() / wanted.norm() < 3e-3
    c = kv_a[:, :512].double()
    normed = c * (c.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    entry = torch.cat((normed, turned(kv_a[:, 512:], cos, sin)), dim=-1)
    for row in (0, 1):
        slot = positions[row]
        assert (cache[row, slot].double() - entry[row]).norm() / entry[row].norm() < 4e-3
        before[row, slot] = cache[row, slot].double()
    assert torch.equal(cache.double(), before)


def test_add_norm() -> None:
    x, delta, weight = random(3, 7168), random(3, 7168), random(7168)
    total, normed = add_norm(x, delta, weight, 1e-6)
    wanted = x.double() + delta.double()
    assert (total - wanted).norm() / wanted.norm() < 3e-3
    wanted = wanted * (wanted.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    assert (normed - wanted).norm() / wanted.norm() < 5e-3
