"""MLA prefill attention against float64. Needs a GPU and Triton."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kimi_k2.kernels.attention import flash_prefill
from kimi_k2.kernels.attention.mla_prefill import mla_prefill, supports_mla_naive_attention
from kimi_k2.ops.mla import Ragged, mla_naive_attention, mla_ragged_attention
from kimi_k2.ops.registry import pin

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SCALE = 0.1147


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def reference(nope: Tensor, rope: Tensor, expanded: Tensor, cache: Tensor, positions: Tensor) -> Tensor:
    keys, values = expanded.double().split([128, 128], dim=-1)
    scores = torch.einsum("bshd,bhtd->bhst", nope.double(), keys)
    scores += torch.einsum("bshd,btd->bhst", rope.double(), cache[..., 512:].double())
    hidden = torch.arange(cache.shape[1], device="cuda") > positions.clamp(min=0)[:, None, :, None]
    weights = (scores * SCALE).masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhst,bhtv->bshv", weights, values)


@pytest.mark.parametrize(("queries", "slots"), [(1000, 1000), (300, 1000), (1, 129), (128, 128)])
@pytest.mark.parametrize("heads", [8, 64])
def test_matches_float64(queries: int, slots: int, heads: int) -> None:
    torch.manual_seed(queries)
    nope, rope = random(2, heads, queries, 128).transpose(1, 2), random(2, queries, heads, 64)
    expanded, cache = random(2, heads, slots, 256), random(2, slots, 576)
    # One sequence fills the cache; the other is shorter, with padding before it.
    ahead = torch.arange(slots - queries, slots)
    positions = torch.stack((ahead, torch.arange(queries) - min(7, queries - 1))).cuda()
    out = mla_prefill(nope, rope, expanded, cache, positions, SCALE)
    wanted = reference(nope, rope, expanded, cache, positions)
    assert float((out.double() - wanted).norm() / wanted.norm()) < 4e-3
    assert torch.equal(out, mla_prefill(nope, rope, expanded, cache, positions, SCALE))


def test_the_model_takes_it() -> None:
    nope, rope, cache, kv_b = random(2, 70, 8, 128), random(2, 70, 8, 64), random(2, 100, 576), random(8, 256, 512)
    kv_b, positions = kv_b * 0.03, torch.arange(30, 100, device="cuda").expand(2, 70)
    assert supports_mla_naive_attention(nope, rope, cache, kv_b, positions, SCALE)
    expanded = torch.matmul(cache[..., :512].double().unsqueeze(1), kv_b.double().mT)
    wanted = reference(nope, rope, expanded, cache, positions)
    out = mla_naive_attention(nope, rope, cache, kv_b, positions, SCALE)
    assert float((out.double() - wanted).norm() / wanted.norm()) < 6e-3


@pytest.mark.parametrize(("queries", "slots"), [(2048, 2048), (2100, 5000), (4097, 4097)])
@pytest.mark.parametrize("heads", [8, 64])
def test_flash_attention_takes_whole_chunks(queries: int, slots: int, heads: int) -> None:
    if flash_prefill.flash_attention() is None:
        pytest.skip("needs vLLM's FlashAttention 3")
    torch.manual_seed(queries)
    q, rope, cache = random(1, queries, heads, 192), random(1, queries, heads, 64), random(1, slots, 576)
    nope, kv_b = q[..., :128], random(heads, 256, 512) * 0.03
    positions = torch.arange(slots - queries, slots, device="cuda")[None]
    given = nope, rope, cache, kv_b, positions, SCALE
    assert flash_prefill.supports(*given, whole=True)
    assert not flash_prefill.supports(*given)
    found = mla_naive_attention(*given, whole=True)
    pin("mla_naive_attention=mla_prefill")
    ours = mla_naive_attention(*given, whole=True)
    pin("")
    assert not torch.equal(found, ours)
    expanded = torch.matmul(cache[..., :512].double().unsqueeze(1), kv_b.double().mT)
    for head in range(0, heads, 7):
        one = slice(head, head + 1)
        wanted = reference(nope[:, -200:, one], rope[:, -200:, one], expanded[:, one], cache, positions[:, -200:])
        assert float((found[:, -200:, one].double() - wanted).norm() / wanted.norm()) < 6e-3
    assert float((found.double() - ours.double()).norm() / ours.double().norm()) < 6e-3
    assert torch.equal(found, mla_naive_attention(*given, whole=True))
    # Queries rotated in place, a cache longer than what is attended over.
    q[..., 128:] = rope
    longer = torch.cat((cache, random(1, 100, 576)), dim=1)[:, :slots]
    assert torch.equal(found, mla_naive_attention(nope, q[..., 128:], longer, *given[3:], whole=True))


@pytest.mark.parametrize(("new", "lengths"), [((5, 64, 300), (5, 64, 300)), ((2, 130, 1, 700), (1000, 130, 65, 701))])
def test_sequences_one_after_the_other(new: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    if flash_prefill.flash_attention() is None:
        pytest.skip("needs vLLM's FlashAttention 3")
    torch.manual_seed(len(new))
    q, slots, kv_b = random(sum(new), 8, 192), random(sum(lengths), 576), random(8, 256, 512) * 0.03
    nope, rope = q.split([128, 64], dim=-1)
    queries, keys = (
        Ragged(rows, torch.tensor([0, *itertools.accumulate(rows)], device="cuda").int()) for rows in (new, lengths)
    )
    given = nope, rope, slots, kv_b, queries, keys, SCALE
    assert mla_ragged_attention.choose(*given).name == "flash_attn_3"
    out = mla_ragged_attention(*given)
    pin("mla_ragged_attention=plain,mla_naive_attention=plain")
    wanted = mla_ragged_attention(*(one.double() if isinstance(one, Tensor) else one for one in given))  # type: ignore[arg-type]
    pin("")
    assert float((out.double() - wanted).norm() / wanted.norm()) < 6e-3
