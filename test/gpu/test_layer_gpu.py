"""What lies between attention's products, on a GPU against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_k2.bench.kernels.mla_cases import reference
from kimi_k2.kernels.attention.attend_values import attend_values
from kimi_k2.kernels.attention.mla_decode import mla_decode
from kimi_k2.kernels.attention.mla_plan import mla_plan
from kimi_k2.kernels.attention.query import query_and_entry
from kimi_k2.kernels.attention.value_rows import value_rows
from kimi_k2.kernels.linear.fused_linear import fused_linear
from kimi_k2.kernels.router.norm_route import add_norm_route
from kimi_k2.kernels.router.router_gemm import router_decode
from kimi_k2.kernels.rowwise.decode import absorb_and_store, add_norm

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Complex product of each pair, in float64."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())).flatten(-2)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("batch", [3, 40])
def test_query_and_cache_entry(heads: int, batch: int) -> None:
    """W_UK in the launch and, for more sequences, as a GEMM of its own."""
    q, kv_a, w_uk = random(batch, heads * 192), random(batch, 2112)[:, 1536:], random(heads, 128, 512) * 0.05
    cache, norm, cos, sin = random(batch, 70, 576), random(512), random(batch, 32), random(batch, 32)
    positions = torch.tensor([5, 69, *[-1] * (batch - 2)], device="cuda")
    slots, before = positions.clone(), cache.double()
    slots[1] += 70
    query = absorb_and_store(q, kv_a, norm, cos, sin, slots, w_uk, cache, 1e-6)
    nope, rope = q.view(batch, heads, 192).split([128, 64], dim=-1)
    latent = torch.einsum("bhn,hnr->bhr", nope.double(), w_uk.double())
    wanted = torch.cat((latent, rotated(rope, cos[:, None], sin[:, None])), dim=-1)
    assert (query.double() - wanted).norm() / wanted.norm() < 3e-3
    c = kv_a[:, :512].double()
    normed = c * (c.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    entry = torch.cat((normed, rotated(kv_a[:, 512:], cos, sin)), dim=-1)
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


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@hopper
@pytest.mark.parametrize(("tokens", "heads"), [(1, 8), (4, 8), (2, 64)])
@pytest.mark.parametrize("fp8", [True, False])
def test_query_and_entry_in_one_launch(tokens: int, heads: int, fp8: bool) -> None:
    """The query against float64, the entry against `absorb_and_store`, which other tests hold to float64."""
    both, q_norm, kv_norm = random(tokens, 2112), random(1536), random(512)
    q_b = (torch.randn(heads * 192, 1536, device="cuda") * 20).to(torch.float8_e4m3fn)
    scale = torch.rand(heads * 192 // 128, 12, device="cuda") * 1e-3 + 1e-3 if fp8 else None
    if scale is None:
        q_b = random(heads * 192, 1536) * 0.03
    cos, sin, w_uk = random(tokens, 32), random(tokens, 32), random(heads, 128, 512) * 0.05
    slots = torch.tensor([5, -1, 2 * 70 + 69, 4 * 70][:tokens], device="cuda")
    caches = [torch.zeros(tokens, 70, 576, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    arguments = both, q_norm, q_b, scale, kv_norm, cos, sin, slots, w_uk
    found = query_and_entry(*arguments, caches[0], 1e-6, 1e-5)
    again = query_and_entry(*arguments, caches[0], 1e-6, 1e-5)
    q = fused_linear(both[:, :1536].contiguous(), q_b, scale, q_norm, 1e-6)
    absorb_and_store(q, both[:, 1536:], kv_norm, cos, sin, slots, w_uk, caches[1], 1e-5)
    x = both[:, :1536].double()
    x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * q_norm.double()
    weight = q_b.double()
    if scale is not None:
        weight = weight * scale.double().repeat_interleave(128, 0)[: len(q_b)].repeat_interleave(128, 1)
    exact = (x @ weight.T).view(tokens, heads, 192)
    latent = torch.einsum("bhn,hnr->bhr", exact[..., :128], w_uk.double())
    wanted = torch.cat((latent, rotated(exact[..., 128:], cos[:, None], sin[:, None])), dim=-1)
    assert torch.equal(found, again)
    # q rounded to BF16 between the products, its input rounded twice, the result once.
    assert distance(found, wanted) < 5e-3
    assert distance(caches[0], caches[1]) < 1e-3
    assert not caches[0][1:2].any()


@hopper
@pytest.mark.parametrize(("tokens", "heads", "capacity"), [
    (1, 8, 1024), (3, 8, 5000), (2, 64, 300), (1, 8, 40), (1, 16, 1024), (3, 16, 5000), (2, 32, 9000),
])  # fmt: skip
def test_attention_with_values(tokens: int, heads: int, capacity: int) -> None:
    query, cache, w_uv = random(tokens, heads, 576), random(tokens, capacity, 576), random(heads, 128, 512)
    for length in (capacity, 1, 0):
        lengths = torch.tensor([length, capacity // 2, capacity][:tokens], dtype=torch.int32, device="cuda")
        found = attend_values(query, cache, lengths, w_uv, 0.05)
        wanted = value_rows(mla_decode(query, cache, lengths, 0.05), w_uv)
        assert torch.equal(found, attend_values(query, cache, lengths, w_uv, 0.05))
        assert bool(found.isfinite().all())
        assert (found.double() - wanted.double()).norm() <= 3e-3 * wanted.double().norm()


@hopper
@pytest.mark.parametrize("lengths", [[5000, 1, 0, 700], [9000, 64], [100] * 8], ids=str)
@pytest.mark.parametrize("heads", [8, 16, 64])
def test_attention_with_values_by_a_plan(lengths: list[int], heads: int) -> None:
    torch.manual_seed(0)
    tokens, capacity = len(lengths), 9000
    query, cache, w_uv = random(tokens, heads, 576), random(tokens, capacity, 576), random(heads, 128, 512)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    plan = mla_plan(seq_lens, capacity, heads)
    found = attend_values(query, cache, seq_lens, w_uv, 0.05, plan)
    wanted = torch.einsum("bhr,hvr->bhv", reference(query, cache, lengths, 0.05), w_uv.double()).flatten(1)
    assert torch.equal(found, attend_values(query, cache, seq_lens, w_uv, 0.05, plan))
    assert bool(found.isfinite().all())
    assert distance(found, wanted) < 6e-3


@hopper
@pytest.mark.parametrize("tokens", [1, 3, 8, 11])
@pytest.mark.parametrize("experts", [384, 256, 32])
def test_norm_and_route(tokens: int, experts: int) -> None:
    x, delta, norm = random(tokens, 7168), random(tokens, 7168) * 3, random(7168)
    weight, bias = random(experts, 7168) * 0.02, torch.randn(experts, device="cuda")
    options = 8, True, 2.827
    for _ in range(3):
        total, normed, indices, weights = add_norm_route(x, delta, norm, 1e-6, weight, bias, *options)
        wanted = add_norm(x, delta, norm, 1e-6)
        assert torch.equal(total, wanted[0])
        assert distance(normed, wanted[1]) < 1e-3
        exact = x.double() + delta.double()
        exact = exact * (exact.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
        assert distance(normed, exact) < 1.8e-3  # one rounding to BF16; two: 2.3e-3
        routed = router_decode(wanted[1], weight, bias, *options)
        scores = (exact @ weight.double().T).sigmoid()
        chosen = scores.gather(1, indices)
        best = (scores + bias.double()).topk(8).values.sum(-1)
        assert ((chosen + bias.double()[indices]).sum(-1) > best - 0.02).all()
        assert distance(weights, chosen / chosen.sum(-1, keepdim=True) * 2.827) < 5e-3
        same = (routed[0] == indices).all(-1)
        assert distance(weights[same], routed[1][same]) < 5e-3 if same.any() else tokens < 3
        again = add_norm_route(x, delta, norm, 1e-6, weight, bias, *options)
        assert all(torch.equal(a, b) for a, b in zip(again, (total, normed, indices, weights), strict=True))
