"""Attention as a part of a whole-layer kernel: over a cache of the rank's own, or of a group of ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.column_router import EarlyLogits
from kimi_k2.nki.kernels.columns import BLOCK, all_ones, turn_columns
from kimi_k2.nki.kernels.exchange import from_other_core, share_of
from kimi_k2.nki.kernels.expanded_attention import MOST_TILES, ExpandedAttention
from kimi_k2.nki.kernels.flash_decoding import merged_parts
from kimi_k2.nki.kernels.latent_attention import LatentAttention, Queries
from kimi_k2.nki.kernels.projections import OutputProjection, QueryProjection
from kimi_k2.nki.kernels.residual import OwnColumns, residual_share


class Layer(NamedTuple):
    """Weights of a MoE layer on one rank, as the arguments of `attention_decode` and `moe_decode` of the same names.

    Attributes:
        early_residual, early_heads: the early router's, of `attention_decode`.
        next_residual, next_experts, next_shared: folded down projections of the next layer, [n, N], [E_local, I, N] and
            [I_shared, N]; all None in the last one.
    """

    q_norm: Any
    kv_norm: Any
    q_b: Any
    q_b_scales: Any
    w_uk: Any
    w_uk_scales: Any
    w_uv: Any
    w_uv_scales: Any
    o_proj: Any
    o_scales: Any
    early_residual: Any
    early_heads: Any
    latents: Any
    keys: Any
    norm: Any
    bias: Any
    gate_up: Any
    gate_up_scales: Any
    down: Any
    down_scales: Any
    shared_gate_up: Any
    shared_gate_up_scales: Any
    shared_down: Any
    shared_down_scales: Any
    next_residual: Any
    next_experts: Any
    next_shared: Any


class Step(nl.NKIObject):  # type: ignore[misc]
    """What all layers share; see `decode_layers`."""

    def __init__(
        self, dtype: Any, ranks: int, groups: list[list[int]], rotation: Any, lengths: Any, first_expert: Any,
        num_experts: int,
    ) -> None:  # fmt: skip
        self.dtype, self.ranks, self.rotation, self.lengths = dtype, ranks, rotation, lengths
        self.first_expert = first_expert
        if not isinstance(first_expert, int):  # on as many partitions as there are tokens
            self.first_expert = nl.ndarray((lengths.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=self.first_expert, src=first_expert.ap(pattern=[[0, lengths.shape[0]], [1, 1]]))
        self.num_experts = num_experts
        self.softmax_scale = self.routed_scaling_factor = self.eps = self.latent_eps = 0.0
        self.attended = 0
        self.identity = nl.shared_identity_matrix(BLOCK, dtype=dtype)
        self.exact = nl.shared_identity_matrix(BLOCK, dtype=nl.float32)
        self.ones = all_ones()
        self.group, self.summands = ncc.ReplicaGroup(groups), len(groups[0]) * nl.num_programs()
        self.cache_group: Any = None
        self.cache_ranks = 1
        self.own: Any = None
        self.query_tile: Any = None

    def share_cache(self, groups: list[list[int]] | None, own: Any) -> None:
        """Arguments of `decode_layers` for flash decoding."""
        if groups is not None:
            self.cache_group, self.cache_ranks, self.own = ncc.ReplicaGroup(groups), len(groups[0]), own


class Attention(nl.NKIObject):  # type: ignore[misc]
    """Attention of one layer: weights and cache are loaded first, where the kernel can wait for them least.

    Attributes:
        whole: whether a core goes through all of o_proj, with its part of the slots.
    """

    whole = True

    def __init__(self, layer: Layer, step: Step) -> None:
        self.layer, self.step = layer, step
        self.before: Any = None
        self.behind: Any = None
        self.early: Any = None
        self.core: Any = None

    def load_weights(self) -> None:
        """Load what comes before and behind the cache."""
        layer, step = self.layer, self.step
        self.before = QueryProjection(
            layer.q_norm, layer.kv_norm, *self._query_weights(), step.rotation, step.identity, step.ones,
            step.latent_eps, self._query_tile(),
        )  # fmt: skip
        self.behind = OutputProjection(
            layer.w_uv, layer.w_uv_scales, layer.o_proj, layer.o_scales, step.exact, whole=self.whole
        )

    def _query_weights(self) -> tuple[Any, Any, Any, Any]:
        layer = self.layer
        return layer.q_b, layer.q_b_scales, layer.w_uk, layer.w_uk_scales

    def _query_tile(self) -> Any:
        return None

    def load_cache(self) -> None:
        """Load the cache and the early router."""
        layer, step = self.layer, self.step
        first, count = share_of(step.attended // BLOCK)
        cache, shared = (layer.latents, layer.keys, step.lengths), (step.identity, step.exact, step.ones)
        one = layer.latents.shape[0] * layer.w_uk.shape[0] == 1 and step.own is None
        alike = layer.w_uk_scales is None and layer.w_uk.dtype == layer.latents.dtype
        if one and alike and count <= MOST_TILES:
            self.core = ExpandedAttention(*cache, first, count, *shared, self.before.w_uk[0], self.behind.w_uv[0])
        else:
            self.core = LatentAttention(*cache, step.own, first, count, *shared, turns_later=True)
        self.early = EarlyLogits(layer.early_residual, layer.early_heads)

    def apply(
        self, hidden: Any, projected: Any, own: OwnColumns, following: Attention | None = None
    ) -> tuple[Any, Any]:
        """This core's summand of the residual behind attention and of the router's logits; and the queries.

        The summand is float32 [128, H/128 + E/128, B].

        Args:
            hidden: float32 [128, H/128, B], the residual.
            projected: float32 [128, ceil(N/128), B], down projections without the norm's scalar.
            own: this rank's columns of a part of the residual; those of both cores add up.
            following: the next layer's, whose cache may be loaded where a collective runs.
        """
        step, (_, chunks, batch) = self.step, hidden.shape
        expanded = isinstance(self.core, ExpandedAttention)
        queries = self.before.queries_of_sums(projected, hidden, step.eps, step.dtype, absorb=not expanded)
        share = residual_share(hidden, step.summands)
        factor: Any = None

        def take() -> None:
            self.early.own = own.columns(nl.float32)

        def meanwhile() -> None:
            take()
            self.early.begin()

        if expanded:
            # o_proj does not wait for the other core.
            values, shares = self.core.attend_values(queries, step.softmax_scale, step.dtype, take, self.early.begin)
            factor = shares.result()[:, :, 0]
        else:
            sums, shares = self.core.attend_apart(queries, step.softmax_scale, step.dtype, meanwhile)
            blocks, heads = sums.shape[1], sums.shape[3]
            values = self.behind.values(sums.reshape((BLOCK, blocks, batch * heads)), shares)
        logits = self.early.experts // BLOCK
        summand = nl.ndarray((BLOCK, chunks + logits, batch), dtype=nl.float32, buffer=nl.sbuf)
        self.early.take(values)
        self.behind.columns(values, summand[:, 0:chunks, :], share, factor)
        self.early.end(summand[:, chunks:, :], factor=factor)
        return summand, queries


class SharedAttention(Attention):
    """The same where a group of ranks shares the cache by its slots, one head a rank (flash decoding).

    Every rank makes the queries of the whole group, so that no collective brings them: each core one half of the heads.
    One all-to-all brings each rank the parts of its own head.
    """

    whole = False

    def _query_weights(self) -> tuple[Any, Any, Any, Any]:
        layer, core = self.layer, nl.program_id()
        scales = [None if one is None else one[core] for one in (layer.q_b_scales, layer.w_uk_scales)]
        return layer.q_b[core], scales[0], layer.w_uk[core], scales[1]

    def _query_tile(self) -> Any:
        """The tile that all layers' q_b take in turn: two layers' would fill SBUF."""
        step, tiles = self.step, self.layer.q_b
        if step.query_tile is None:
            step.query_tile = nl.ndarray(tiles.shape[1:], dtype=tiles.dtype, buffer=nl.sbuf)
        return step.query_tile

    def apply(
        self, hidden: Any, projected: Any, own: OwnColumns, following: Attention | None = None
    ) -> tuple[Any, Any]:
        """As `Attention.apply`; of o_proj each core has its share of the blocks."""
        step, (_, chunks, batch) = self.step, hidden.shape
        queries = self.before.queries_of_sums(projected, hidden, step.eps, step.dtype)
        _gather_heads(queries, batch)
        if following is not None:
            following.load_weights()
        parts = self.core.attend_alone(queries, step.softmax_scale)
        exchanged = self._exchange(*parts)
        if following is not None:
            following.load_cache()
        self.early.own = own.columns(nl.float32)
        self.early.begin()
        logits = self.early.experts // BLOCK
        summand = nl.ndarray((BLOCK, chunks + logits, batch), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=summand, value=0.0, engine=nisa.engine.gpsimd)
        share = residual_share(hidden, step.summands)
        nisa.tensor_copy(dst=summand[:, 0:chunks, :], src=share, engine=nisa.engine.gpsimd)

        sums, logs = self._parts(exchanged, batch)
        values = self.behind.values(merged_parts(sums, logs, step.exact, step.dtype))
        self.early.take(values)
        first = self.behind.first
        mine = slice(first, first + self.behind.o_proj.shape[2] // BLOCK)
        self.behind.columns(values, summand[:, mine, :], share[:, mine, :])
        self.early.end(summand[:, chunks:, :], apart=False)
        return summand, queries

    def _exchange(self, sums: Any, total: Any, top: Any) -> Any:
        """This core's parts of all heads to the ranks of the heads: [ranks, cores, B, rank + 1] of this rank's head.

        Args:
            sums: float32 [128, B, rank / 128, heads], before they are divided by their weights.
            total, top: float32 [128, B, heads], weights and maxima, on every partition.
        """
        step, (rows, batch, blocks, heads) = self.step, sums.shape
        count, cores = batch * heads, nl.num_programs()
        logs = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=logs, op=nl.log, data=total)
        nisa.tensor_tensor(dst=logs, data1=logs, data2=top, op=nl.add)
        inverse = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=inverse, data=total)
        divided = nl.ndarray((rows, blocks, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=divided.permute((0, 2, 1, 3)),
            data1=sums,
            data2=inverse.expand_dim(2).broadcast(2, blocks),
            op=nl.multiply,
        )
        turned = turn_columns(divided.reshape((rows, blocks, count)), step.exact)
        in_rows = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        by_row = nl.ndarray((count, BLOCK), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=by_row, stationary=logs.reshape((rows, count)), moving=step.exact, is_transpose=True)
        nisa.tensor_copy(dst=in_rows, src=by_row[:, 0:1])
        shape = (heads, cores, batch, blocks * BLOCK + 1)
        source = nl.ndarray(shape, dtype=nl.float32, buffer=nl.shared_hbm if cores > 1 else nl.private_hbm)
        result = nl.ndarray(shape, dtype=nl.float32, buffer=source.buffer)
        mine = source[:, nl.program_id()].permute((1, 0, 2))
        nisa.dma_copy(dst=mine[:, :, 0 : blocks * BLOCK], src=turned)
        nisa.dma_copy(dst=mine[:, :, blocks * BLOCK :], src=in_rows)
        if cores > 1:
            nisa.core_barrier(source, (0, 1))
        ncc.all_to_all(srcs=[source], dsts=[result], replica_group=step.cache_group, collective_dim=0)
        return result

    def _parts(self, exchanged: Any, batch: int) -> tuple[Any, Any]:
        """[ranks * cores, B, rank] in SBUF, and the logs of their weights [B, ranks * cores]."""
        heads, cores, _, size = exchanged.shape
        flat = exchanged.reshape((heads * cores, batch, size))
        sums = nl.ndarray((heads * cores, batch, size - 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=sums, src=flat[:, :, 0 : size - 1], engine=nisa.engine.scalar)
        logs = nl.ndarray((batch, heads * cores), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=logs, src=flat[:, :, size - 1].permute((1, 0)), engine=nisa.engine.scalar)
        return sums, logs


def _gather_heads(queries: Any, batch: int) -> None:
    """Queries of both cores' heads on both, core 0's first."""
    if nl.num_programs() == 1:
        return
    rows, chunks, _ = queries.latent.shape
    used, copies, _, each = queries.rope.shape
    mine = nl.ndarray((rows, chunks + 1, batch, each), dtype=queries.latent.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=mine[:, 0:chunks].reshape((rows, chunks, batch * each)), src=queries.latent)
    if used < rows:
        nisa.memset(dst=mine[:, chunks], value=0.0, engine=nisa.engine.gpsimd)
    places = [slice(copy * used // copies, (copy + 1) * used // copies) for copy in range(copies)]
    for copy, place in enumerate(places):
        nisa.tensor_copy(dst=mine[place, chunks], src=queries.rope[place, copy])
    theirs = from_other_core(mine)
    whole = nl.ndarray((rows, chunks, batch, 2, each), dtype=queries.latent.dtype, buffer=nl.sbuf)
    rope = Queries.rows_of_keys(used // copies, batch, 2 * each, queries.latent.dtype)
    both = (mine, theirs) if nl.program_id() == 0 else (theirs, mine)
    for core, (part, engine) in enumerate(zip(both, (nisa.engine.vector, nisa.engine.scalar), strict=True)):
        nisa.tensor_copy(dst=whole[:, :, :, core, :], src=part[:, 0:chunks], engine=engine)
        for copy, place in enumerate(places):
            target = rope[place, copy, :, core * each : (core + 1) * each]
            nisa.tensor_copy(dst=target, src=part[place, chunks], engine=engine)
    queries.latent = whole.reshape((rows, chunks, batch * 2 * each))
    queries.rope, queries.heads = rope, 2 * each
