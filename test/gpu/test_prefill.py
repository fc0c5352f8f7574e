"""MLA prefill attention against float64.

`KIMI_K2_DRAWS` is the number of drawn cases.
"""

from __future__ import annotations

import os
import random

import torch
from exact import distance
from machines import Machine, rows
from torch import Tensor

from kimi_k2.kernels.attention.mla_prefill import mla_prefill, mla_prefill_ragged, supports_mla_naive_attention
from kimi_k2.ops import registry
from kimi_k2.ops.mla import Ragged, mla_naive_attention, mla_ragged_attention
from kimi_k2.ops.registry import pin

SCALE = 0.1147
DRAWN = int(os.environ.get("KIMI_K2_DRAWS", "12"))


def reference(nope: Tensor, rope: Tensor, expanded: Tensor, cache: Tensor, positions: Tensor) -> Tensor:
    """Head by head, whose scores are many."""
    hidden = torch.arange(cache.shape[1], device=cache.device) > positions.clamp(min=0)[..., None]
    out = []
    for q, rotated, head in zip(nope.unbind(2), rope.unbind(2), expanded.unbind(1), strict=True):
        keys, values = head.double().split([128, 128], dim=-1)
        scores = q.double() @ keys.mT + rotated.double() @ cache[..., 512:].double().mT
        out.append((scores * SCALE).masked_fill(hidden, float("-inf")).softmax(-1) @ values.nan_to_num())
    return torch.stack(out, dim=2)


@rows(
    "queries slots heads ranks",
    gpu=[
        (*sizes, heads, ranks)
        for sizes in ((1000, 1000), (300, 1000), (1, 129), (128, 128), (1, 1))
        for heads, ranks in ((8, 0), (8, 1), (8, 2), (64, 1))
    ],
)
def test_matches_float64(machine: Machine, queries: int, slots: int, heads: int, ranks: int) -> None:
    """One sequence fills the cache, its last position past it; the other is shorter, with padding before it.

    What no query sees is NaN.
    """
    nope, rope = machine.normal(2, heads, queries, 128).transpose(1, 2), machine.normal(2, queries, heads, 64)
    expanded, cache = machine.normal(2, heads, slots, 256), machine.normal(2, slots, 576)
    before = min(7, queries - 1)
    positions = torch.stack((torch.arange(slots - queries, slots), torch.arange(queries) - before)).to(machine.device)
    positions[0, -1] += 5
    cache[1, queries - before :] = expanded[1, :, queries - before :] = float("nan")
    out = mla_prefill(nope, rope, expanded, cache, positions, SCALE, ranks)
    assert distance(out, reference(nope, rope, expanded, cache, positions)) < 4e-3
    replay = machine.recorded(lambda: mla_prefill(nope, rope, expanded, cache, positions, SCALE, ranks))
    assert torch.equal(out, replay()) and torch.equal(out, replay())


def lengths_of(rng: random.Random, most: int) -> tuple[int, int]:
    """New tokens of a sequence and its slots, short and long ones alike."""
    slots = int(most ** rng.random())
    return rng.choice([slots, int(slots ** rng.random()), rng.randint(1, slots)]), slots


@rows("seed", gpu=[(seed,) for seed in range(DRAWN)])
def test_drawn_lengths(machine: Machine, seed: int) -> None:
    """Alone, and several one after the other; strided queries, expanded by head and by slot."""
    rng = random.Random(seed)
    alone = seed % 2
    some = [lengths_of(rng, 9000 if alone else 2500) for _ in range(1 if alone else rng.randint(2, 40))]
    new, lengths = map(list, zip(*some, strict=True))
    heads = rng.choice([1, 2, 8] if alone else [2, 8, 16])
    q, slots = machine.normal(sum(new), heads, 192), machine.normal(sum(lengths), 592)[:, :576]
    nope, rope = q.split([128, 64], dim=-1)
    expanded = machine.normal(heads, sum(lengths), 256)
    if rng.random() < 0.5:
        expanded = expanded.transpose(0, 1).contiguous().transpose(0, 1)
    found = {ranks: mla_prefill_ragged(nope, rope, expanded, slots, new, lengths, SCALE, ranks) for ranks in (0, 1, 2)}
    parts = zip(nope.split(new), rope.split(new), expanded.split(lengths, 1), slots.split(lengths), strict=True)
    first = 0
    for part in parts:
        count, length = len(part[0]), len(part[3])
        positions = torch.arange(length - count, length, device="cuda").unsqueeze(0)
        one = *(tensor.unsqueeze(0) for tensor in part), positions
        wanted = reference(*one)
        for ranks, out in found.items():
            assert distance(out[first : first + count], wanted[0]) < 4e-3, (ranks, count, length)
        assert torch.equal(found[1][first : first + count], mla_prefill(*one, SCALE, 1)[0])
        first += count


@rows("", gpu=[()])
def test_a_query_has_the_same_bits_in_any_chunk(machine: Machine) -> None:
    nope, rope = machine.normal(1, 1500, 4, 192).split([128, 64], dim=-1)
    expanded, cache = machine.normal(1, 4, 1500, 256), machine.normal(1, 1500, 576)
    positions = torch.arange(1500, device="cuda").unsqueeze(0)
    whole = mla_prefill(nope, rope, expanded, cache, positions, SCALE, 1)
    for begin, end, slots in ((0, 1, 1), (0, 77, 177), (77, 500, 500), (500, 1333, 1400), (1499, 1500, 1500)):
        queries = slice(begin, end)
        given = nope[:, queries], rope[:, queries], expanded[:, :, :slots], cache[:, :slots], positions[:, queries]
        assert torch.equal(mla_prefill(*given, SCALE, 1), whole[:, queries])


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


@rows("new lengths", gpu=[((5, 64, 300), (5, 64, 300)), ((2, 130, 1, 700), (1000, 130, 65, 701))])
def test_sequences_one_after_the_other(machine: Machine, new: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    """In batch-invariant mode each has the bits that it has alone."""
    q, slots, kv_b = (
        machine.normal(sum(new), 8, 192),
        machine.normal(sum(lengths), 576),
        machine.normal(8, 256, 512) * 0.03,
    )
    nope, rope = q.split([128, 64], dim=-1)
    queries, keys = (
        Ragged(some, torch.tensor([0, *torch.tensor(some).cumsum(0)], device="cuda").int()) for some in (new, lengths)
    )
    given = nope, rope, slots, kv_b, queries, keys, SCALE
    assert mla_ragged_attention.choose(*given).name == "mla_prefill"
    out = mla_ragged_attention(*given)
    pin("mla_ragged_attention=plain,mla_naive_attention=plain")
    wanted = mla_ragged_attention(*(one.double() if isinstance(one, Tensor) else one for one in given))  # type: ignore[arg-type]
    assert distance(out, wanted) < 6e-3
    with registry.computing(batch_invariant=True):
        pin("")
        together = mla_ragged_attention(*given)
        pin("mla_ragged_attention=plain")
        assert torch.equal(together, mla_ragged_attention(*given))
    pin("")


@rows("wrong", gpu=[("nope",), ("rope",), ("cache",)])
def test_rows_between_whole_16_bytes_are_not_taken(machine: Machine, wrong: str) -> None:
    shapes = {"nope": (1, 5, 8, 128), "rope": (1, 5, 8, 64), "cache": (1, 9, 576)}
    wide = {name: machine.normal(*shape[:-1], shape[-1] + (name == wrong)) for name, shape in shapes.items()}
    nope, rope, cache = (wide[name][..., : shape[-1]] for name, shape in shapes.items())
    kv_b, positions = machine.normal(8, 256, 512), torch.zeros(1, 5, dtype=torch.int64, device="cuda")
    assert not supports_mla_naive_attention(nope, rope, cache, kv_b, positions, SCALE)
