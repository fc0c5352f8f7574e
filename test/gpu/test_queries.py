"""The launches around attention at decode, against float64: queries and cache entries, values, joined parts."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from exact import E4M3, blocks, dense, distance, normed, turned
from machines import Machine, rows
from paged import paged_case, reference
from torch import Tensor

from kimi_k2.kernels.attention.attend_values import attend_values
from kimi_k2.kernels.attention.mla_decode import mla_decode
from kimi_k2.kernels.attention.mla_plan import mla_plan
from kimi_k2.kernels.attention.query import absorb, query_and_entry
from kimi_k2.kernels.attention.value_rows import batched_value_rows, value_rows
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.rowwise.decode import absorb_and_store

CAPACITY = 70


@rows(
    "kind tokens heads",
    # W_UK in the launch, of groups of tokens and, of more, as a GEMM of its own.
    gpu=[
        *(("absorb_and_store", *sizes) for sizes in ((3, 8), (3, 64), (40, 8), (40, 64), (130, 8))),
        *((kind, *sizes) for kind in ("fp8", "bf16") for sizes in ((1, 8), (4, 8), (2, 64), (7, 8), (16, 16))),
        ("absorb", 21, 8), ("invariant", 40, 8), ("e4m3", 3, 8), ("e4m3", 40, 8),
    ],
    cpu=[("absorb", 21, 2), ("fp8", 3, 2), ("bf16", 3, 2), ("fp8", 9, 1)],
    triton=[
        ("absorb_and_store", 3, 2), ("absorb_and_store", 17, 4), ("absorb_and_store", 130, 2), ("invariant", 3, 2),
        ("e4m3", 6, 2),
    ],
)  # fmt: skip
def test_queries_and_entries(machine: Machine, kind: str, tokens: int, heads: int) -> None:
    """Behind q_b or its input; slots inside the cache and outside, where nothing is written; an e4m3 cache's scale."""
    device, slots = machine.device, torch.arange(tokens) * (CAPACITY + 1)  # of every row another
    slots[1::3], slots[2::5] = -1, tokens * CAPACITY
    qkv, q, w_uk = machine.normal(tokens, 2112), machine.normal(tokens, heads * 192), machine.normal(heads, 128, 512)
    q_norm, kv_norm = machine.normal(1536), machine.normal(512)
    cos, sin = machine.normal(tokens, 32), machine.normal(tokens, 32)
    cache, cache_scale, most_stored = machine.normal(tokens, CAPACITY, 576), 1.0, math.inf
    if kind == "e4m3":
        cache, cache_scale, most_stored = cache.to(E4M3), 0.25, 112.0
        kv_norm[0] = 1000.0 if machine.name == "gpu" else 1.0  # the interpreter does not saturate
    weight, scale = (
        blocks(heads * 192, 1536, device=device) if kind == "fp8" else (machine.normal(heads * 192, 1536), None)
    )

    def call(chosen: list[int]) -> tuple[Tensor, Tensor]:
        made, some = cache.clone(), [tensor[chosen].contiguous() for tensor in (qkv, q, cos, sin, slots.to(device))]
        rest = kv_norm, *some[2:], w_uk, made
        if kind in ("fp8", "bf16"):
            return query_and_entry(some[0], q_norm, weight, scale, *rest, 1e-5, 1e-6), made
        given = some[1], some[0][:, 1536:], *rest, 1e-6
        if kind == "absorb":
            return absorb(*given), made
        return absorb_and_store(*given, cache_scale, kind == "invariant"), made

    found, written = call(list(range(tokens)))
    exact, most = q.double(), 3e-3
    if kind in ("fp8", "bf16"):
        # q rounded to BF16 between the products, its input rounded twice, the result once.
        exact, most = normed(qkv[:, :1536], q_norm, 1e-5) @ dense(weight, scale).T, 5e-3
    nope, rope = exact.view(tokens, heads, 192).split([128, 64], dim=-1)
    wanted = torch.einsum("bhn,hnr->bhr", nope, w_uk.double()), turned(rope, cos[:, None], sin[:, None])
    for part, right in zip(found.split([512, 64], dim=-1), wanted, strict=True):
        assert distance(part, right) < machine.limit(most)
    entries = torch.cat((normed(qkv[:, 1536:2048], kv_norm), turned(qkv[:, 2048:], cos, sin)), dim=-1)
    inside = (slots >= 0) & (slots < tokens * CAPACITY)
    before, after = (tensor.float().view(-1, 576) * cache_scale for tensor in (cache, written))
    held = slots[inside].to(device)
    # The interpreter loses carries where it rounds to e4m3.
    stored = machine.limit(4e-3) if kind != "e4m3" else 0.04 if machine.name == "gpu" else 0.2
    right = entries[inside.to(device)].clamp(-most_stored, most_stored)
    for columns in (slice(1), slice(1, None)):
        assert distance(after[held, columns], right[:, columns]) < stored
    after[held] = before[held]
    assert torch.equal(after, before)
    again, alone = call(list(range(tokens))), call([tokens - 1])
    assert torch.equal(again[0], found)
    assert kind in ("absorb_and_store", "e4m3") or torch.equal(alone[0], found[-1:])


@rows("tokens heads width", gpu=[(1, 8, 128), (3, 8, 128), (8, 64, 128), (19, 8, 128)], cpu=[(19, 2, 20), (1, 2, 20)])
def test_value_rows(machine: Machine, tokens: int, heads: int, width: int) -> None:
    """Of a few tokens a row a warp, of more several; the same bits."""
    latent, w_uv = machine.normal(tokens, heads, 512), machine.normal(heads, width, 512)
    wanted = torch.einsum("bhr,hvr->bhv", latent.double(), w_uv.double()).flatten(1)
    found, batched = value_rows(latent, w_uv), batched_value_rows(latent, w_uv)
    assert distance(found, wanted) < 2.5e-3 and distance(batched, wanted) < 2.5e-3
    assert torch.equal(value_rows(latent[:3], w_uv), found[:3])
    assert batched.is_contiguous() and batched_value_rows(latent[:0], w_uv).shape == (0, heads * width)


EVEN = [(1, 2), (16, 2), (37, 2), (128, 2), (128, 17), (5, 17)]


@rows("splits heads", gpu=[(splits, 8) for splits, _ in EVEN], cpu=EVEN)
def test_joined_values(machine: Machine, splits: int, heads: int) -> None:
    """Parts that were never written, and a token without context; clusters of eight blocks and of four."""
    sums = torch.randn(2, heads, splits) * 3
    sums[0, :, splits // 2 :: 3] = sums[1, 1] = -torch.inf
    sums[0, :, 0] = 1.0
    parts = torch.randn(2, heads, splits, 512).masked_fill(sums[..., None] == -torch.inf, torch.nan)
    check_joined(machine, parts, sums, list(zip(parts.transpose(1, 2), sums.transpose(1, 2), strict=True)), splits)


@rows("some_parts heads", gpu=[(0, 8), (5, 8)], cpu=[(0, 2), (5, 2), (0, 5)])
def test_joined_values_of_a_plan(machine: Machine, some_parts: int, heads: int) -> None:
    """Requests of many parts, one and none, whose items lie one after another, all heads of an item together.

    With `some_parts` in the steps of another kernel: three kinds of requests, by their parts.
    """
    counts = torch.tensor([37, 1, 0, 128, 4, 5, 32])
    firsts = [0, *counts.cumsum(0).tolist()]
    parts, sums = torch.randn(firsts[-1], heads, 512), torch.randn(firsts[-1], heads) * 3
    plan = torch.full((2 * len(counts), 4), -1, dtype=torch.int32)
    plan[len(counts) :, 0], plan[len(counts) :, 1] = torch.tensor(firsts[:-1]), counts
    mine = [(parts[begin:end], sums[begin:end]) for begin, end in pairwise(firsts)]
    check_joined(machine, parts, sums, mine, 1, plan, some_parts)


def check_joined(
    machine: Machine, parts: Tensor, sums: Tensor, mine: list[tuple[Tensor, Tensor]], splits: int,
    plan: Tensor | None = None, some_parts: int = 0,
) -> None:  # fmt: skip
    """`mine` are each token's parts [S, H, 512] and sums [S, H]."""
    heads, device = mine[0][0].shape[1], machine.device
    w_uv, out = machine.normal(heads, 128, 512), machine.normal(len(mine), heads * 128)
    operands = [None if tensor is None else tensor.to(device) for tensor in (parts, sums, w_uv, out, plan)]
    sizes = len(mine), heads, splits, some_parts
    launch("attention/attend_values", "kimi_join_values", "join", torch.device(device), *operands, *sizes)
    for found, (own, logarithms) in zip(out.cpu().view(-1, heads, 128), mine, strict=True):
        share = (logarithms.double() * math.log(2)).softmax(0).nan_to_num()
        latent = torch.einsum("sh,shr->hr", share, own.double().nan_to_num())
        wanted = torch.einsum("hr,hvr->hv", latent, w_uv.cpu().double())
        for head in range(heads):
            assert distance(found[head], wanted[head]) < 4e-3 if wanted[head].any() else not found[head].any()


UNPLANNED = [(1, 8, 1024), (3, 8, 5000), (2, 64, 300), (1, 8, 40), (1, 16, 1024), (3, 16, 5000), (2, 32, 9000)]


@rows("lengths heads capacity planned", gpu=[
    *(([length, capacity // 2, capacity][:tokens], heads, capacity, False)
      for tokens, heads, capacity in UNPLANNED for length in (capacity, 1, 0)),
    *((lengths, heads, 9000, True)
      for lengths in ([5000, 1, 0, 700], [9000, 64], [100] * 8) for heads in (8, 16, 64)),
])  # fmt: skip
def test_attention_with_values(machine: Machine, lengths: list[int], heads: int, capacity: int, planned: bool) -> None:
    """The same bits in one piece and in pages; NaN wherever no sequence has a row."""
    query, whole, pages, table, seq_lens = paged_case(lengths, heads, capacity)
    w_uv = machine.normal(heads, 128, 512)

    def attend(cache: Tensor, table: Tensor | None) -> Any:
        plan = mla_plan(seq_lens, whole.shape[1], heads) if planned else None
        return attend_values(query, cache, seq_lens, w_uv, 0.05, plan, table)

    found = attend(whole, None)
    wanted = torch.einsum("bhr,hvr->bhv", reference(query, whole, lengths, 0.05), w_uv.double()).flatten(1)
    apart = value_rows(mla_decode(query, whole, seq_lens, 0.05), w_uv).double()
    assert torch.equal(found, attend(pages, table)) and torch.equal(found, attend(pages, table))
    assert bool(found.isfinite().all()) and not found[seq_lens == 0].any()
    assert (found.double() - wanted).norm() <= 6e-3 * wanted.norm()
    assert (found.double() - apart).norm() <= (5e-3 if planned else 3e-3) * apart.norm()
