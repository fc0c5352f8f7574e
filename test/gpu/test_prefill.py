"""MLA prefill attention against float64: our kernel, and what FlashAttention 3 is given."""

from __future__ import annotations

import itertools

import pytest
import torch
from exact import distance
from machines import Machine, rows
from torch import Tensor

from kimi_k2.kernels.attention import flash_prefill
from kimi_k2.kernels.attention.mla_prefill import mla_prefill, supports_mla_naive_attention
from kimi_k2.ops.mla import Ragged, mla_naive_attention, mla_ragged_attention
from kimi_k2.ops.registry import pin

SCALE = 0.1147


def reference(nope: Tensor, rope: Tensor, expanded: Tensor, cache: Tensor, positions: Tensor) -> Tensor:
    keys, values = expanded.double().split([128, 128], dim=-1)
    scores = torch.einsum("bshd,bhtd->bhst", nope.double(), keys)
    scores += torch.einsum("bshd,btd->bhst", rope.double(), cache[..., 512:].double())
    hidden = torch.arange(cache.shape[1], device=cache.device) > positions.clamp(min=0)[:, None, :, None]
    weights = (scores * SCALE).masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bhst,bhtv->bshv", weights, values.nan_to_num())


@rows(
    "queries slots heads",
    gpu=[(*sizes, heads) for sizes in ((1000, 1000), (300, 1000), (1, 129), (128, 128)) for heads in (8, 64)],
    triton=[(150, 150, 2), (137, 190, 2)],
)
def test_matches_float64(machine: Machine, queries: int, slots: int, heads: int) -> None:
    """One sequence fills the cache, its last position past it; the other is shorter, with padding before it.

    What no query sees is NaN.
    """
    nope, rope = machine.normal(2, heads, queries, 128).transpose(1, 2), machine.normal(2, queries, heads, 64)
    expanded, cache = machine.normal(2, heads, slots, 256), machine.normal(2, slots, 576)
    before = min(7, queries - 1)
    positions = torch.stack((torch.arange(slots - queries, slots), torch.arange(queries) - before)).to(machine.device)
    positions[0, -1] += 5
    cache[1, queries - before :] = expanded[1, :, queries - before :] = float("nan")
    out = mla_prefill(nope, rope, expanded, cache, positions, SCALE)
    assert distance(out, reference(nope, rope, expanded, cache, positions)) < machine.limit(4e-3)
    assert torch.equal(out, mla_prefill(nope, rope, expanded, cache, positions, SCALE))


@rows("tokens heads", gpu=[(70, 8)], triton=[(70, 3)])
def test_what_flash_attention_is_given(machine: Machine, tokens: int, heads: int) -> None:
    """Strided parts, more tokens than a block has; a whole's halves are not copied."""
    left, right = machine.normal(heads, tokens, 256)[..., :128].transpose(0, 1), machine.normal(tokens, heads, 64)
    assert torch.equal(flash_prefill.join(left, right), torch.cat((left, right), dim=-1))
    whole = machine.normal(tokens, heads, 192)
    together = flash_prefill.join(*whole.split([128, 64], dim=-1))
    assert torch.equal(together, whole) and together.data_ptr() == whole.data_ptr()
    slots, kv_b = machine.normal(tokens, 600)[:, :576], machine.normal(heads, 256, 512)
    keys, values = flash_prefill.keys_and_values(slots, kv_b)
    expanded = torch.einsum("tr,hvr->thv", slots[:, :512].double(), kv_b.double())
    assert torch.equal(keys[..., 128:], slots[:, None, 512:].expand(-1, heads, -1))
    assert distance(torch.cat((keys[..., :128], values), dim=-1), expanded) < machine.limit(2.5e-3)


@rows("", gpu=[()])
def test_the_model_takes_it(machine: Machine) -> None:
    nope, rope, cache, kv_b = (
        machine.normal(2, 70, 8, 128),
        machine.normal(2, 70, 8, 64),
        machine.normal(2, 100, 576),
        machine.normal(8, 256, 512),
    )
    kv_b, positions = kv_b * 0.03, torch.arange(30, 100, device="cuda").expand(2, 70)
    assert supports_mla_naive_attention(nope, rope, cache, kv_b, positions, SCALE)
    expanded = torch.matmul(cache[..., :512].double().unsqueeze(1), kv_b.double().mT)
    wanted = reference(nope, rope, expanded, cache, positions)
    out = mla_naive_attention(nope, rope, cache, kv_b, positions, SCALE)
    assert distance(out, wanted) < 6e-3


@rows(
    "queries slots heads",
    gpu=[(*sizes, heads) for sizes in ((2048, 2048), (2100, 5000), (4097, 4097)) for heads in (8, 64)],
)
def test_flash_attention_takes_whole_chunks(machine: Machine, queries: int, slots: int, heads: int) -> None:
    if flash_prefill.flash_attention() is None:
        pytest.skip("needs vLLM's FlashAttention 3")
    q, rope, cache = (
        machine.normal(1, queries, heads, 192),
        machine.normal(1, queries, heads, 64),
        machine.normal(1, slots, 576),
    )
    nope, kv_b = q[..., :128], machine.normal(heads, 256, 512) * 0.03
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
        assert distance(found[:, -200:, one], wanted) < 6e-3
    assert distance(found, ours) < 6e-3
    assert torch.equal(found, mla_naive_attention(*given, whole=True))
    # Queries rotated in place, a cache longer than what is attended over.
    q[..., 128:] = rope
    longer = torch.cat((cache, machine.normal(1, 100, 576)), dim=1)[:, :slots]
    assert torch.equal(found, mla_naive_attention(nope, q[..., 128:], longer, *given[3:], whole=True))


@rows("new lengths", gpu=[((5, 64, 300), (5, 64, 300)), ((2, 130, 1, 700), (1000, 130, 65, 701))])
def test_sequences_one_after_the_other(machine: Machine, new: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    if flash_prefill.flash_attention() is None:
        pytest.skip("needs vLLM's FlashAttention 3")
    q, slots, kv_b = (
        machine.normal(sum(new), 8, 192),
        machine.normal(sum(lengths), 576),
        machine.normal(8, 256, 512) * 0.03,
    )
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
    assert distance(out, wanted) < 6e-3
