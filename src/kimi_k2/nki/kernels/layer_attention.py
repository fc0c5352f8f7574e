"""Attention as a part of a whole-layer kernel: over a cache of the rank's own, or of a group of ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.column_router import EarlyLogits
from kimi_k2.nki.kernels.columns import BLOCK, all_ones, norm_scalar, turn_columns
from kimi_k2.nki.kernels.exchange import from_other_core, share_of
from kimi_k2.nki.kernels.flash_decoding import merged_parts
from kimi_k2.nki.kernels.latent_attention import LatentAttention
from kimi_k2.nki.kernels.projections import OutputProjection, QueryProjection
from kimi_k2.nki.kernels.residual import OwnColumns


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
        self.group = ncc.ReplicaGroup(groups)
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
        self.core = LatentAttention(
            layer.latents, layer.keys, step.lengths, step.own, first, count, step.identity, step.exact, step.ones,
            turns_later=True,
        )  # fmt: skip
        self.early = EarlyLogits(layer.early_residual, layer.early_heads)

    def apply(self, hidden: Any, projected: Any, following: Attention | None = None) -> tuple[Any, Any]:
        """This core's summand of the output and the router's logits, [128, H/128 + E/128, B]; and the queries.

        Args:
            hidden: float32 [128, H/128, B], the residual.
            projected: float32 [128, ceil(N/128), B], down projections without the norm's scalar.
            following: the next layer's, whose cache may be loaded where a collective runs.
        """
        step, (_, chunks, batch) = self.step, hidden.shape
        scale = norm_scalar(hidden, step.ones, step.eps)
        queries = self.before.queries_of_sums(projected, scale, step.dtype)
        own = OwnColumns(hidden, step.exact, step.ranks)
        sums, shares = self.core.attend_apart(
            queries, step.softmax_scale, lambda: self.early.begin(own.columns(nl.float32))
        )
        blocks, heads = sums.shape[2], sums.shape[3]
        rounded = nl.ndarray((BLOCK, blocks, batch, heads), dtype=step.dtype, buffer=nl.sbuf)
        nisa.tensor_copy(dst=rounded.permute((0, 2, 1, 3)), src=sums)
        values = self.behind.values(rounded.reshape((BLOCK, blocks, batch * heads)), shares)
        logits = self.early.experts // BLOCK
        summand = nl.ndarray((BLOCK, chunks + logits, batch), dtype=nl.float32, buffer=nl.sbuf)
        self.early.end(values, summand[:, chunks:, :])
        self.behind.columns(values, summand[:, 0:chunks, :])
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

    def apply(self, hidden: Any, projected: Any, following: Attention | None = None) -> tuple[Any, Any]:
        """As `Attention.apply`; each core has its share of the blocks, and zeros elsewhere."""
        step, (_, chunks, batch) = self.step, hidden.shape
        scale = norm_scalar(hidden, step.ones, step.eps)
        queries = self.before.queries_of_sums(projected, scale, step.dtype)
        _gather_heads(queries, batch)
        if following is not None:
            following.load_weights()
        own = OwnColumns(hidden, step.exact, step.ranks)
        parts = self.core.attend_alone(queries, step.softmax_scale)
        exchanged = self._exchange(*parts)
        if following is not None:
            following.load_cache()
        self.early.begin(own.columns(nl.float32))
        logits = self.early.experts // BLOCK
        summand = nl.ndarray((BLOCK, chunks + logits, batch), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=summand, value=0.0, engine=nisa.engine.gpsimd)

        sums, logs = self._parts(exchanged, batch)
        values = self.behind.values(merged_parts(sums, logs, step.exact, step.dtype))
        self.early.end(values, summand[:, chunks:, :], apart=False)
        first = self.behind.first
        count = self.behind.o_proj.shape[2] // BLOCK
        self.behind.columns(values, summand[:, first : first + count, :])
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
    each, copies = queries.heads, queries.rope.shape[0]
    mine = nl.ndarray((rows, chunks + 1, batch, each), dtype=queries.latent.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=mine[:, 0:chunks].reshape((rows, chunks, batch * each)), src=queries.latent)
    if copies < rows:
        nisa.memset(dst=mine[:, chunks], value=0.0, engine=nisa.engine.gpsimd)
    nisa.tensor_copy(dst=mine[0:copies, chunks].reshape((copies, batch * each)), src=queries.rope)
    theirs = from_other_core(mine)
    whole = nl.ndarray((rows, chunks + 1, batch, 2, each), dtype=queries.latent.dtype, buffer=nl.sbuf)
    first, second = (mine, theirs) if nl.program_id() == 0 else (theirs, mine)
    nisa.tensor_copy(dst=whole[:, :, :, 0, :], src=first)
    nisa.tensor_copy(dst=whole[:, :, :, 1, :], src=second, engine=nisa.engine.scalar)
    flat = whole.reshape((rows, chunks + 1, batch * 2 * each))
    queries.latent, queries.rope, queries.heads = flat[:, 0:chunks], flat[0:copies, chunks], 2 * each
