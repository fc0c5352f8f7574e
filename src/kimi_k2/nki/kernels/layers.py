"""A decode step's MoE layers in one NKI kernel, with the two all-reduces of each inside.

Behind attention one all-reduce carries its output and the router's logits (`sharding.early_router`), behind the experts
one carries theirs and the next layer's down projections (`sharding.early_qkv_a`). They go from SBUF to SBUF, each core
of LNC=2 with its own summand: half of the cache's slots, half of a token's experts. While a collective runs, the kernel
loads what does not depend on it and transposes the next cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.column_router import ColumnRouter
from kimi_k2.nki.kernels.columns import BLOCK, load_columns, norm_scalar, scaled, store_columns, turn_rows
from kimi_k2.nki.kernels.exchange import share_of
from kimi_k2.nki.kernels.experts import RoutedExperts
from kimi_k2.nki.kernels.layer_attention import FIELDS, Attention, Layer, Step
from kimi_k2.nki.kernels.projections import turn_short_rows, write_entries
from kimi_k2.nki.kernels.residual import NextProjections, OwnColumns, Sum, residual_share
from kimi_k2.nki.kernels.shared_expert import SharedExpert


def layer_of(tensors: Mapping[str, Any]) -> tuple[Any, ...]:
    """A layer's argument from its tensors by name; None where there is none."""
    unknown = sorted(set(tensors) - set(FIELDS))
    if unknown:
        raise ValueError(f"layers: expected fields of Layer, got {unknown[0]!r}")
    return tuple(tensors.get(field) for field in FIELDS)


class Experts(nl.NKIObject):  # type: ignore[misc]
    """Router, routed and shared experts of one layer; what every token needs is loaded when it is made."""

    next: Any

    def __init__(self, layer: Layer, step: Step) -> None:
        blocks = layer.gate_up.shape[2]
        first, count = share_of(blocks)
        self.step, self.first, self.count = step, first, count
        self.router = ColumnRouter(layer.bias, step.routed_scaling_factor, step.exact)
        self.gain = load_columns(layer.norm.reshape((1, blocks * BLOCK)), step.identity)
        self.shared = SharedExpert(layer, first, count)
        self.next = None
        if layer.next_residual != None:
            self.next = NextProjections(layer.next_residual, layer.next_shared)
        # Each core adds up its half of a token's experts; where other ranks hold some, so that it may have many or few
        # of them, half of each: of gate and up these blocks, of down rows.
        local, double = layer.gate_up.shape[0], layer.gate_up.shape[3]
        self.slot, slots = share_of(8)
        self.begin, size = 0, blocks
        if local < step.num_experts and double == BLOCK:
            self.slot, slots, self.begin, size = 0, 8, first, count
        self.routed = RoutedExperts(layer, step.num_experts, self.begin, size, slots)

    def apply(self, hidden: Any, logits: Any) -> Any:
        """This core's summand of the residual and the next down projections, float32 [128, H/128 + ceil(N/128), T].

        Args:
            hidden: float32 [128, H/128, T], the residual.
            logits: float32 [128, E/128, T], without the norm's scalar.
        """
        step, chunks, tokens = self.step, hidden.shape[1], hidden.shape[2]
        scale = norm_scalar(hidden, step.ones, step.eps)
        index, scores = self.router.choose(logits, scale)
        begin, end = self.slot, self.slot + self.routed.slots
        local_rows, is_local = self.routed.numbers(index[:, begin:end], step.first_expert)
        own = None
        if self.next != None:
            own = OwnColumns(hidden, step.exact, step.ranks)
        columns = scaled(hidden, self.gain, scale, step.dtype)
        kept = self.routed.kept(self.router.weights(scores, index)[:, begin:end], is_local)

        # While the chosen experts are on their way.
        begin, end = self.first, self.first + self.count
        inner = self.shared.activated(columns[:, begin:end, :])
        extra = 0 if self.next == None else self.next.blocks
        base = nl.ndarray((BLOCK, chunks + extra, tokens), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=base, value=0.0, engine=nisa.engine.gpsimd)
        share = residual_share(hidden, step.summands)
        nisa.tensor_copy(dst=base[:, 0:chunks, :], src=share, engine=nisa.engine.gpsimd)
        outer = self.shared.outer(inner)
        nisa.tensor_tensor(dst=base[:, begin:end, :], data1=outer, data2=share[:, begin:end, :], op=nl.add)
        if own != None:
            self.next.add(own.columns(step.dtype), inner, base[:, chunks:, :])
        begin, end = self.begin, self.begin + self.routed.count
        return self.routed.sum(columns[:, begin:end, :], local_rows, kept, base, step.exact)


@nki.jit
def decode_layers(
    hidden: Any,
    projected: Any,
    layers: Any,
    rotation: Any,
    lengths: Any,
    ranks: int,
    groups: Any,
    first_expert: Any,
    num_experts: int,
    softmax_scale: float,
    routed_scaling_factor: float,
    eps: float,
    cache_groups: Any = None,
    own: Any = None,
    latent_eps: Any = None,
    attended: Any = None,
) -> tuple[Any, ...]:
    """MoE layers of one token for each of B sequences, on one of `ranks` ranks; or of several tokens for each.

    With several tokens B counts them all, those of a sequence one after another; caches and `lengths` are by sequence.

    Args:
        hidden: float32 [B, H], the residual before the first layer's attention; on all ranks.
        projected: float32 [B, N], the first layer's q_a and kv_a of it without the norm's scalar; on all ranks.
        layers: weights and caches, a tuple in the order of `layer_attention.FIELDS` each, which `layer_of` makes.
        rotation: as that of `projections.QueryProjection`.
        lengths: int32 [B, 1], slots in use, without the new entry.
        ranks: among which the residual's columns are divided.
        groups: of the all-reduces, all ranks: tuples of ranks in a tuple.
        first_expert: global number of the rank's first expert; where one graph serves all ranks int32 [1, 1] in HBM.
        num_experts: of all ranks.
        softmax_scale, routed_scaling_factor, eps: of the configuration.
        cache_groups: ranks that share a cache, each with a part of its slots and one head (flash decoding); q_b and
            w_uk are then those of all heads of the group, one half of them on each core: [cores, 128, q_rank/128,
            heads/cores * (128 + rope)] and [cores, heads/cores, 128, 1, rank]. At LNC=2; attention's weights in FP8
            are taken with these alone.
        own: with `cache_groups`, int32 [B, 1], 1 where this rank counts the new entry.
        latent_eps: of the norms behind q_a and kv_a, where it is another.
        attended: slots of the caches that are read, from the first on; None for all.

    Returns:
        (hidden float32 [B, H/128, 128] behind the last layer, on all ranks; new latents [layers, B, rank] and rotated
        keys [layers, B, rope], which the caller writes to the caches; where the last layer has folded down projections
        of a next one, those, float32 [B, ceil(N/128), 128], padded).
    """
    latents = Layer(layers[0]).latents
    step = Step(
        latents.dtype, ranks, groups, rotation, lengths, first_expert, num_experts, softmax_scale,
        routed_scaling_factor, eps, eps if latent_eps == None else latent_eps,
        latents.shape[1] if attended == None else attended, cache_groups, own,
    )  # fmt: skip
    return _computed(hidden, projected, layers, step)


@nki.jit
def decode_layer(
    hidden: Any,
    projected: Any,
    rotation: Any,
    lengths: Any,
    runs: Any,
    first_expert: Any,
    q_norm: Any,
    kv_norm: Any,
    q_b: Any,
    w_uk: Any,
    w_uv: Any,
    o_proj: Any,
    early_residual: Any,
    early_heads: Any,
    latents: Any,
    keys: Any,
    norm: Any,
    bias: Any,
    gate_up: Any,
    gate_up_scales: Any,
    down: Any,
    down_scales: Any,
    shared_gate_up: Any,
    shared_down: Any,
    each: int,
    ranks: int,
    groups: Any,
    num_experts: int,
    softmax_scale: float,
    routed_scaling_factor: float,
    eps: float,
    latent_eps: float,
    shared_gate_up_scales: Any = None,
    shared_down_scales: Any = None,
    next_residual: Any = None,
    next_experts: Any = None,
    next_shared: Any = None,
) -> tuple[Any, ...]:
    """One layer of `decode_layers` over a cache in pages, its tensors by the names of `layer_attention.FIELDS`.

    vllm-neuron's `wrap_nki` takes tensors as arguments of their own alone, not in tuples.

    Args:
        latents, keys, runs, each: pages and where sequences lie in them, `former`, `latter`, `runs` and `each` of
            `latent_cache.Pages`; slots of a sequence a multiple of 128 (of 256 at LNC=2).
    """
    layer = (
        q_norm, kv_norm, q_b, None, w_uk, None, w_uv, None, o_proj, None, early_residual, early_heads, latents, keys,
        norm, bias, gate_up, gate_up_scales, down, down_scales, shared_gate_up, shared_gate_up_scales, shared_down,
        shared_down_scales, next_residual, next_experts, next_shared,
    )  # fmt: skip
    step = Step(
        latents.dtype, ranks, groups, rotation, lengths, first_expert, num_experts, softmax_scale,
        routed_scaling_factor, eps, latent_eps, runs.shape[1] * each, None, None, runs, each,
    )  # fmt: skip
    return _computed(hidden, projected, (layer,), step)


def _computed(hidden: Any, projected: Any, layers: Any, step: Step) -> tuple[Any, ...]:
    count, batch = len(layers), hidden.shape[0]
    layer = Layer(layers[0])
    dtype, rank, rope = step.dtype, layer.w_uk.shape[len(layer.w_uk.shape) - 1], step.rotation.shape[1]
    attention = Attention(layer, step)
    attention.load_weights()
    attention.load_cache()
    loaded = load_columns(hidden, step.exact)
    stream = nl.ndarray(loaded.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=stream, src=loaded)
    downs = _load_downs(projected, step.exact)
    chunks = stream.shape[1]
    own_part = OwnColumns(residual_share(stream, nl.num_programs()), step.exact, step.ranks)
    new_latents = nl.ndarray((count, batch, rank), dtype=dtype, buffer=nl.shared_hbm)
    new_keys = nl.ndarray((count, batch, rope), dtype=dtype, buffer=nl.shared_hbm)
    moved = None
    for number in range(count):
        # Behind the collective before, and ahead of its result: loads of the next two stages, transposes of this one.
        experts = Experts(layer, step)
        following = None
        if number + 1 < count:
            layer = Layer(layers[number + 1])
            following = Attention(layer, step)
            if not step.shared:
                following.load_weights()
        attention.core.turn()
        if moved != None:
            own_part = OwnColumns(moved.total[:, 0:chunks, :], step.exact, step.ranks)  # without the other core's part
            total = moved.result()
            stream, downs = total[:, 0:chunks, :], total[:, chunks:, :]
        summand, queries = attention.apply(stream, downs, own_part, following)
        summed = Sum(summand, step.group)
        write_entries(queries, step.identity, new_latents[number], new_keys[number])
        if following != None and not step.shared:
            following.load_cache()
        total = summed.result()
        moved = Sum(experts.apply(total[:, 0:chunks, :], total[:, chunks:, :]), step.group)
        attention = following  # type: ignore[assignment]
    total = moved.result()  # type: ignore[union-attr]
    out = _stored(total[:, 0:chunks, :], step.exact)
    if layer.next_residual == None:
        return out, new_latents, new_keys
    return out, new_latents, new_keys, _stored(total[:, chunks:, :], step.exact)


def _stored(columns: Any, exact: Any) -> Any:
    """Columns float32 [128, n, T] as a result [T, n, 128], a share of the blocks by each core."""
    blocks = columns.shape[1]
    out = nl.ndarray((columns.shape[2], blocks, BLOCK), dtype=nl.float32, buffer=nl.shared_hbm)
    begin, count = share_of(blocks)
    store_columns(out, columns[:, begin : begin + count, :], begin, exact)
    return out


def _load_downs(rows: Any, exact: Any) -> Any:
    """Rows float32 [B, N] in HBM as columns [128, ceil(N/128), B]."""
    batch, width = rows.shape
    loaded = nl.ndarray((batch, width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=loaded, src=rows)
    whole, rest = width // BLOCK, width % BLOCK
    columns = nl.ndarray((BLOCK, (width + BLOCK - 1) // BLOCK, batch), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=columns[:, 0:whole, :], src=turn_rows(loaded[:, 0 : whole * BLOCK], exact))
    turn_short_rows(loaded[:, whole * BLOCK :], exact, columns[0:rest, whole, :])  # the rotary key's
    return columns
