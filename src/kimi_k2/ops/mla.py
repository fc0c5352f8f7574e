"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), its compressed cache and pages of it.

The cache holds, for each token, the normed latent c (kv_lora_rank) and one rotary key shared by all heads. The naive
form expands every cached latent to keys and values. The absorbed form moves kv_b_proj to the other side:
q_nope . (W_UK c) = (W_UK^T q_nope) . c, and the value projection W_UV is applied after the weighted sum of latents.
One new token a sequence goes by the absorbed form, in functions that are joined as kernels join them.

Sizes: B sequences, S or T new tokens, H heads, N pages of P slots; rank is kv_lora_rank, rope qk_rope_head_dim, nope
qk_nope_head_dim, C = rank + rope values a slot. Slots are numbered through all pages. `block_table` names the pages of
each sequence, any of the cache's. A cache in one piece for each sequence is one of N = B pages, of which sequence b has
page b: its block table is int32 [B, 1], 0 .. B - 1, and may be left out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.ops.embedding import apply_rotary_interleaved
from kimi_k2.ops.linear import Sums, Weight, attend_blocks, in_blocks, linear_heads, linear_rows, project, rms_norm
from kimi_k2.ops.registry import COMPOSED, ELEMENTWISE, operation

# Slots of a sequence whose entries the plain function over pages copies at a time.
SLOTS_AT_ONCE = 512


def to_cache(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries as a cache of `dtype` holds them; e4m3 is saturated at 448, as vLLM's FP8 cache of scale 1 is."""
    if dtype == torch.float8_e4m3fn:
        entries = entries.clamp(-448.0, 448.0)
    return entries.to(dtype)


@operation(batch_invariant=ELEMENTWISE)
def store_entries(cache: Tensor, entries: Tensor, positions: Tensor) -> None:
    """Put entries [B, S, C] into the slots `positions` int64 [B, S] of cache [B, T, C]; negative ones into none.

    Nothing is read back from a GPU, so that a CUDA graph can hold the call. Positions from T on are the caller's error:
    PyTorch raises or, on a GPU, may write elsewhere or drop them.
    """
    (batch, capacity, width), size = cache.shape, entries.shape[0] * entries.shape[1]
    entries = to_cache(entries, cache.dtype)
    if cache.dtype == torch.float8_e4m3fn:  # PyTorch indexes no FP8
        cache, entries = cache.view(torch.uint8), entries.view(torch.uint8)
    if positions.device.type == "cpu" or not size:
        rows, columns = torch.where(positions >= 0)
        cache[rows, positions[rows, columns]] = entries[rows, columns]
        return
    first = torch.arange(0, batch * capacity, capacity, device=positions.device).unsqueeze(1)
    slots = torch.where(positions >= 0, positions + first, -1).flatten()
    _store_unread(cache, entries.reshape(size, width), slots)


def _store_unread(cache: Tensor, entries: Tensor, slots: Tensor) -> None:
    """Entries [T, C] into slots int64 [T] of cache [N, P, C], of which none is read back.

    Padding repeats what the first token stores; without any token slot 0 is written with what it holds.
    """
    there, order = slots >= 0, torch.arange(len(slots), device=slots.device)
    source = torch.where(there, order, there.int().argmax())
    at = slots[source].clamp(min=0)
    pages, within = at.div(cache.shape[1], rounding_mode="floor"), at % cache.shape[1]
    cache[pages, within] = torch.where(there.any(), entries[source], cache[pages, within])


def store_slots(cache: Tensor, entries: Tensor, slots: Tensor) -> None:
    """`store_entries` of entries [T, C] into slots int64 [T], numbered through all of cache [N, P, C]."""
    store_entries(cache.view(1, -1, cache.shape[-1]), entries.unsqueeze(0), slots.unsqueeze(0))


def slots_of(positions: Tensor, block_table: Tensor, page: int) -> Tensor:
    """int64 [B] or [B, S], none negative, to slots numbered through all pages of `page` slots."""
    if block_table.shape[1] == 1:
        return torch.add(positions, block_table.view(-1, *[1] * (positions.dim() - 1)), alpha=page)
    pages = block_table.gather(1, (positions // page).view(len(positions), -1)).view_as(positions)
    return pages.long() * page + positions % page


@operation(batch_invariant=ELEMENTWISE)
def token_places(positions: Tensor, block_table: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Where the new tokens of B sequences go.

    Args:
        positions: int64 [B] or [B, S]; negative ones are padding.
        block_table: int32 [B, pages].
        page: slots a page.

    Returns:
        int32 [B * S], slots of its sequence in use once a token is stored, of padding 0, and int64 [B * S], the slots
        to store them in, of padding -1.
    """
    slots = torch.where(positions >= 0, slots_of(positions.clamp(min=0), block_table, page), -1)
    return (positions + 1).clamp(min=0).flatten().to(torch.int32), slots.flatten()


def gather_pages(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first `length` slots of each sequence, a copy.

    Args:
        cache: [N, P, C].
        block_table: int32 [B, pages], of each P slots of a sequence; entries past its end may be anything within N.
        length: at least 1.

    Returns:
        [B, length, C].
    """
    count = -(-length // cache.shape[1])
    return cache[block_table[:, :count].long()].flatten(1, 2)[:, :length]


@operation(batch_invariant=ELEMENTWISE)
def next_step(
    seq_lens: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, page: int
) -> None:
    """Each sequence gets one new token: written are its length, its position and its slot. Nothing is read back.

    Rows of length 0 are padding: they keep it, and get token and position 0 and a negative slot, so that what they
    compute follows from no earlier step.

    Args:
        seq_lens: int32 [B], tokens in the cache; one more afterwards.
        input_ids: int32 [B], the new tokens.
        positions: int64 [B], written.
        slots: int64 [B], written: where the new token is to be stored, numbered through all pages.
        block_table: int32 [B, pages], pages of each sequence.
        page: slots a page.
    """
    there = seq_lens > 0
    positions.copy_(seq_lens)
    slots.copy_(torch.where(there, slots_of(positions, block_table, page), -1))
    seq_lens.add_(there)
    input_ids.mul_(there)


def rotated_queries(q: Tensor, nope: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The part of the queries without position, and the rotated rest.

    Args:
        q: [B, S, H, nope + rope], not rotated.
        nope: qk_nope_head_dim.
        cos, sin: of the positions' angles, [B, S, rope / 2].

    Returns:
        [B, S, H, nope] and [B, S, H, rope].
    """
    q_nope, q_rope = q.split([nope, q.shape[-1] - nope], dim=-1)
    return q_nope, apply_rotary_interleaved(q_rope, cos.unsqueeze(2), sin.unsqueeze(2))


def cache_entries(latent: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What the cache holds of new tokens.

    Args:
        latent: [B, S, rank], normed.
        k_rope: [B, S, rope], not rotated.
        cos, sin: of the positions' angles, [B, S, rope / 2].

    Returns:
        [B, S, rank + rope].
    """
    return torch.cat((latent, apply_rotary_interleaved(k_rope, cos, sin)), dim=-1)


def absorb(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Queries in latent space: [B, S, H, nope] times W_UK [H, nope, rank] to [B, S, H, rank]."""
    if in_blocks(q_nope):
        return linear_heads(q_nope, w_uk)
    return torch.einsum("bshn,hnr->bshr", q_nope, w_uk)


def value_heads(summed: Tensor, w_uv: Tensor) -> Tensor:
    """Values of sums of latents: [B, S, H, rank] times W_UV [H, v_head_dim, rank] to [B, S, H, v_head_dim]."""
    if in_blocks(summed):
        return linear_heads(summed, w_uv.mT)
    return torch.einsum("bshr,hvr->bshv", summed, w_uv)


def causal_softmax(scores: Tensor, positions: Tensor, softmax_scale: float) -> Tensor:
    """Softmax over cached slots, of which a query at position p sees slots 0..p.

    Args:
        scores: [B, H, S, T] unscaled; overwritten.
        positions: int64 [B, S]; padding (negative) attends to slot 0 so that its row stays finite.
        softmax_scale: factor of the scores.

    Returns:
        [B, H, S, T], computed in float32 or wider, in the scores' dtype.
    """
    slots = torch.arange(scores.shape[-1], device=scores.device)
    hidden = slots > positions.clamp(min=0)[:, None, :, None]
    wide = torch.promote_types(scores.dtype, torch.float32)
    return (scores * softmax_scale).masked_fill_(hidden, float("-inf")).softmax(dim=-1, dtype=wide).to(scores.dtype)


@operation
def mla_absorbed_attention(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, positions: Tensor, softmax_scale: float
) -> Tensor:
    """Attention in latent space: every head reads the same cache.

    Args:
        q_latent: [B, S, H, kv_lora_rank], queries with W_UK absorbed.
        q_rope: [B, S, H, qk_rope_head_dim], rotated.
        cache: [B, T, kv_lora_rank + qk_rope_head_dim].
        positions: int64 [B, S], see `causal_softmax`.
        softmax_scale: `KimiK2Config.softmax_scale`.

    Returns:
        [B, S, H, kv_lora_rank], sums of latents, to be multiplied by W_UV.
    """
    batch, length, heads, rank = q_latent.shape
    if in_blocks(cache):
        query, keys = torch.cat((q_latent, q_rope), dim=-1), cache.unsqueeze(1)
        return attend_blocks(query, keys, keys[..., :rank], positions, softmax_scale)
    # Heads and queries form one dimension: one GEMM a sequence, which reads the cache once for all heads.
    query = torch.cat((q_latent, q_rope), dim=-1).flatten(1, 2)
    scores = torch.matmul(query, cache.mT).view(batch, length, heads, -1).transpose(1, 2)
    weights = causal_softmax(scores, positions, softmax_scale).transpose(1, 2).flatten(1, 2)
    return torch.matmul(weights, cache[..., :rank]).view(batch, length, heads, rank)


@operation
def mla_naive_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    positions: Tensor,
    softmax_scale: float,
) -> Tensor:
    """Attention with keys and values expanded from the cache.

    Args:
        q_nope: [B, S, H, qk_nope_head_dim].
        q_rope: [B, S, H, qk_rope_head_dim], rotated.
        cache: [B, T, kv_lora_rank + qk_rope_head_dim].
        kv_b: [H, qk_nope_head_dim + v_head_dim, kv_lora_rank], W_UK above W_UV for each head.
        positions: int64 [B, S], see `causal_softmax`.
        softmax_scale: factor of the scores.

    Returns:
        [B, S, H, v_head_dim].
    """
    nope, rank = q_nope.shape[-1], kv_b.shape[-1]
    latent, k_rope = cache.split([rank, cache.shape[-1] - rank], dim=-1)
    if in_blocks(cache):
        keys, values = (
            linear_rows(latent, rows.flatten(0, 1)).unflatten(-1, rows.shape[:2]).transpose(1, 2)
            for rows in kv_b.split([nope, kv_b.shape[1] - nope], dim=1)
        )
        keys = torch.cat((keys, k_rope.unsqueeze(1).expand(-1, keys.shape[1], -1, -1)), dim=-1)
        return attend_blocks(torch.cat((q_nope, q_rope), dim=-1), keys, values, positions, softmax_scale)
    expanded = torch.matmul(latent.unsqueeze(1), kv_b.mT)  # [B, H, T, nope + v]
    scores = torch.matmul(q_nope.transpose(1, 2), expanded[..., :nope].mT)
    scores = scores + torch.matmul(q_rope.transpose(1, 2), k_rope.unsqueeze(1).mT)
    weights = causal_softmax(scores, positions, softmax_scale)
    return torch.matmul(weights, expanded[..., nope:]).transpose(1, 2)


class Ragged(NamedTuple):
    """Rows of B sequences, one sequence after the other.

    Attributes:
        lengths: rows of each, on the host.
        starts: int32 [B + 1], where each begins and where the last ends, on the rows' device.
    """

    lengths: tuple[int, ...]
    starts: Tensor


@operation(batch_invariant=COMPOSED)
def mla_ragged_attention(
    q_nope: Tensor, q_rope: Tensor, slots: Tensor, kv_b: Tensor, queries: Ragged, keys: Ragged, softmax_scale: float
) -> Tensor:
    """`mla_naive_attention` of each sequence, whose queries are the last of its slots.

    Args:
        q_nope: [T, H, qk_nope_head_dim].
        q_rope: [T, H, qk_rope_head_dim], rotated.
        slots: [S, kv_lora_rank + qk_rope_head_dim].
        kv_b: as `mla_naive_attention` takes it.
        queries: of the T rows.
        keys: of the S slots; each sequence has at least as many as queries.
        softmax_scale: factor of the scores.

    Returns:
        [T, H, v_head_dim].
    """
    parts = zip(q_nope.split(queries.lengths), q_rope.split(queries.lengths), slots.split(keys.lengths), strict=True)
    out = []
    for nope, rope, cache in parts:
        positions = torch.arange(len(cache) - len(nope), len(cache), device=cache.device).unsqueeze(0)
        sequence = nope.unsqueeze(0), rope.unsqueeze(0), cache.unsqueeze(0), kv_b, positions, softmax_scale
        out.append(mla_naive_attention(*sequence).squeeze(0))
    return torch.cat(out)


@operation(batch_invariant=COMPOSED)
def rotate_and_store(
    q: Tensor, kv_a: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Store the entries of a prompt's new tokens and rotate their queries.

    Args:
        q: [T, H, nope + rope], not rotated; nobody reads it afterwards, and the result may take its memory.
        kv_a: [T, C], the latent before its norm, then the key before RoPE.
        kv_norm: [rank].
        cos, sin: [T, rope / 2] at the tokens' positions.
        slots: int64 [T], slots to write, numbered through all N * P; a negative one writes nothing.
        cache: [N, P, C], written.
        eps: of the latent's norm.

    Returns:
        Queries [T, H, nope + rope], the last of each rotated, and the entries [T, C] before they are stored.
    """
    rank, (cos, sin) = len(kv_norm), (cos.unsqueeze(1), sin.unsqueeze(1))
    latent, k_rope = kv_a.unsqueeze(1).split([rank, kv_a.shape[1] - rank], dim=-1)
    entries = cache_entries(rms_norm(latent, kv_norm, eps), k_rope, cos, sin).squeeze(1)
    store_slots(cache, entries, slots)
    nope = q.shape[-1] - k_rope.shape[-1]
    return torch.cat(rotated_queries(q.unsqueeze(1), nope, cos, sin), dim=-1).squeeze(1), entries


@operation
def absorb_and_store(
    q: Tensor,
    kv_a: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    eps: float,
) -> Tensor:
    """Store the new token's entry and make its query.

    Args:
        q: [B, H * (nope + rope)], not rotated.
        kv_a: [B, C], the latent before its norm, then the key before RoPE.
        kv_norm: [rank].
        cos, sin: [B, rope / 2] at the token's position.
        slots: int64 [B], slots to write, numbered through all N * P; a negative one writes nothing.
        w_uk: [H, nope, rank].
        cache: [N, P, C], written.
        eps: of the latent's norm.

    Returns:
        [B, H, C], W_UK^T q_nope, then the rotated part.
    """
    heads, nope, rank = w_uk.shape
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    latent, k_rope = kv_a.unsqueeze(1).split([rank, kv_a.shape[1] - rank], dim=-1)
    store_slots(cache, cache_entries(rms_norm(latent, kv_norm, eps), k_rope, cos, sin).squeeze(1), slots)
    q_nope, q_rope = rotated_queries(q.view(len(q), 1, heads, -1), nope, cos, sin)
    return torch.cat((absorb(q_nope, w_uk), q_rope), dim=-1).squeeze(1)


@operation(batch_invariant=COMPOSED)
def query_and_entry(
    qkv_a: Tensor,
    q_norm: Tensor,
    q_b: Weight,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    q_eps: float,
    kv_eps: float,
) -> Tensor:
    """`absorb_and_store` of q = q_b(rms_norm(q_a)).

    Args:
        qkv_a: [B, q_lora_rank + C], q_a and kv_a side by side.
        q_norm: [q_lora_rank].
        q_b: [H * (nope + rope), q_lora_rank].
        kv_norm, cos, sin, slots, w_uk: as `absorb_and_store` takes them.
        cache: as `absorb_and_store` takes it, written.
        q_eps: epsilon of the queries' norm.
        kv_eps: epsilon of the latent's norm.

    Returns:
        [B, H, C].
    """
    q_a, kv_a = qkv_a.split([q_norm.shape[0], qkv_a.shape[1] - q_norm.shape[0]], dim=-1)
    q = project(q_a, q_b, q_norm, q_eps)
    return absorb_and_store(q, kv_a, kv_norm, cos, sin, slots, w_uk, cache, kv_eps)


@operation(batch_invariant="nothing is planned")
def attention_plan(seq_lens: Tensor, cache: Tensor, heads: int, block_table: Tensor | None = None) -> Tensor | None:
    """How kernels share the attention of a step's layers out by the sequences' lengths; None where none needs that.

    Args:
        seq_lens: int32 [B], as `mla_decode` takes them.
        cache: [N, P, C], of any layer.
        heads: of the queries.
        block_table: as `mla_decode` takes it.

    Returns:
        For `mla_decode` and `attend_values` over these lengths.
    """
    return None


@operation
def mla_decode(
    query: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    rank: int,
    plan: Tensor | None = None,
    block_table: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of one query a sequence over its first `seq_lens` slots.

    Args:
        query: [B, H, C], from `absorb_and_store`.
        cache: [N, P, C].
        seq_lens: int32 [B]; 0 is padding, whose result is finite and of no meaning.
        softmax_scale: `KimiK2Config.softmax_scale`.
        rank: kv_lora_rank.
        plan: of `attention_plan`, for kernels.
        block_table: int32 [B, pages]; entries past a sequence's end may be any page.
        lse: float32 or wider [B, H], takes the natural logarithms of the sums of exponentials; -inf of padding.

    Returns:
        [B, H, rank], sums of latents.
    """
    # On a CPU, where reading a length waits for nothing, slots that no sequence uses are left out.
    longest = max(int(seq_lens.max()), 1) if query.device.type == "cpu" and len(query) else None
    if lse is not None and block_table is None:
        block_table = torch.arange(len(cache), dtype=torch.int32, device=cache.device).unsqueeze(1)
    if block_table is not None:
        block_table = block_table if longest is None else block_table[:, : -(-longest // cache.shape[1])]
        if lse is not None or not in_blocks(query):
            return _attend_pages(query, cache, block_table, seq_lens, softmax_scale, rank, lse)
        cache = gather_pages(cache, block_table, block_table.shape[1] * cache.shape[1])
    cache = cache if longest is None else cache[:, :longest]
    latent, rope = query.unsqueeze(1).split([rank, query.shape[-1] - rank], dim=-1)
    positions = seq_lens.unsqueeze(1).long() - 1
    return mla_absorbed_attention(latent, rope, cache.to(query.dtype), positions, softmax_scale).squeeze(1)


def _attend_pages(
    query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, softmax_scale: float, rank: int,
    lse: Tensor | None,
) -> Tensor:  # fmt: skip
    """`mla_decode` over pages by an online softmax: some pages are copied at a time, and nothing is read back."""
    wide, page = torch.promote_types(query.dtype, torch.float32), cache.shape[1]
    last = (seq_lens.long() - 1).clamp(min=0)[:, None, None]  # padding sees its first slot
    sums, first = Sums.none(query.to(wide), rank), 0
    for pages in block_table.split(max(1, SLOTS_AT_ONCE // page), dim=1):
        entries = cache[pages.long()].flatten(1, 2).to(query.dtype)
        slots = torch.arange(first, first + entries.shape[1], device=query.device)
        scores = torch.matmul(query, entries.mT).to(wide) * softmax_scale
        sums = sums.with_block(scores.masked_fill_(slots > last, float("-inf")), entries[..., :rank])
        first += entries.shape[1]
    if lse is not None:
        logarithms = (sums.top + sums.total.log()).squeeze(-1)
        lse.copy_(logarithms.masked_fill(seq_lens.unsqueeze(1) <= 0, float("-inf")))
    return (sums.summed / sums.total).to(query.dtype)


@operation
def value_rows(latent: Tensor, w_uv: Tensor) -> Tensor:
    """Sums of latents [B, H, rank] times W_UV [H, v_head_dim, rank]: [B, H * v_head_dim]."""
    return value_heads(latent.unsqueeze(1), w_uv).flatten(1)


@operation(batch_invariant=COMPOSED)
def attend_values(
    query: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    w_uv: Tensor,
    softmax_scale: float,
    plan: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """`value_rows` of `mla_decode`: [B, H * v_head_dim]."""
    summed = mla_decode(query, cache, seq_lens, softmax_scale, w_uv.shape[-1], plan, block_table)
    return value_rows(summed, w_uv)
