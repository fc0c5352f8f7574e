"""Attention as a part of a whole-layer kernel: over a cache of the rank's own, or of a group of ranks."""

from __future__ import annotations

from typing import Any

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.column_router import EarlyLogits
from kimi_k2.nki.kernels.columns import BLOCK, all_ones, turn_columns
from kimi_k2.nki.kernels.exchange import from_other_core, share_of
from kimi_k2.nki.kernels.expanded_attention import MOST_TILES, ExpandedAttention
from kimi_k2.nki.kernels.latent_attention import LatentAttention
from kimi_k2.nki.kernels.latent_cache import Pages, rows_of_keys
from kimi_k2.nki.kernels.projections import OutputProjection, QueryProjection, turn_short_rows
from kimi_k2.nki.kernels.residual import OwnColumns, residual_share
from kimi_k2.nki.kernels.views import on_partitions, spread

# Weights of a MoE layer on one rank, as the arguments of `projections`, `RoutedExperts` and `SharedExpert`.
# `next_*` are folded down projections of the next layer, [n, N], [E_local, I, N] and [I_shared, N]; None in the last.
FIELDS = (
    "q_norm", "kv_norm", "q_b", "q_b_scales", "w_uk", "w_uk_scales", "w_uv", "w_uv_scales", "o_proj",
    "o_scales", "early_residual", "early_heads", "latents", "keys", "norm", "bias", "gate_up", "gate_up_scales",
    "down", "down_scales", "shared_gate_up", "shared_gate_up_scales", "shared_down", "shared_down_scales",
    "next_residual", "next_experts", "next_shared",
)  # fmt: skip


class Layer(nl.NKIObject):  # type: ignore[misc]
    """A MoE layer's tensors by name, from a tuple in the order of `FIELDS`."""

    def __init__(self, tensors: tuple[Any, ...]) -> None:
        self.q_norm = tensors[0]
        self.kv_norm = tensors[1]
        self.q_b = tensors[2]
        self.q_b_scales = tensors[3]
        self.w_uk = tensors[4]
        self.w_uk_scales = tensors[5]
        self.w_uv = tensors[6]
        self.w_uv_scales = tensors[7]
        self.o_proj = tensors[8]
        self.o_scales = tensors[9]
        self.early_residual = tensors[10]
        self.early_heads = tensors[11]
        self.latents = tensors[12]
        self.keys = tensors[13]
        self.norm = tensors[14]
        self.bias = tensors[15]
        self.gate_up = tensors[16]
        self.gate_up_scales = tensors[17]
        self.down = tensors[18]
        self.down_scales = tensors[19]
        self.shared_gate_up = tensors[20]
        self.shared_gate_up_scales = tensors[21]
        self.shared_down = tensors[22]
        self.shared_down_scales = tensors[23]
        self.next_residual = tensors[24]
        self.next_experts = tensors[25]
        self.next_shared = tensors[26]


def replica_group(groups: Any) -> Any:
    """A `ReplicaGroup` from tuples of ranks."""
    lists = []
    for number in range(len(groups)):
        ranks = []
        for place in range(len(groups[number])):
            ranks.append(groups[number][place])
        lists.append(ranks)
    return ncc.ReplicaGroup(lists)


class Step(nl.NKIObject):  # type: ignore[misc]
    """What all layers share; see `decode_layers`."""

    cache_group: Any
    query_tile: Any

    def __init__(
        self, dtype: Any, ranks: int, groups: Any, rotation: Any, lengths: Any, first_expert: Any, num_experts: int,
        softmax_scale: float, routed_scaling_factor: float, eps: float, latent_eps: float, attended: int,
        cache_groups: Any, own: Any, runs: Any = None, each: int = 1,
    ) -> None:  # fmt: skip
        self.runs, self.each = runs, each
        self.dtype, self.ranks, self.rotation, self.lengths = dtype, ranks, rotation, lengths
        self.softmax_scale, self.routed_scaling_factor = softmax_scale, routed_scaling_factor
        self.eps, self.latent_eps = eps, latent_eps
        self.attended = attended
        self.first_expert = first_expert
        if not isinstance(first_expert, int):  # on as many partitions as there are tokens
            tokens = rotation.shape[2]
            loaded = nl.ndarray((tokens, 1), dtype=nl.int32, buffer=nl.sbuf)
            nisa.dma_copy(dst=loaded, src=on_partitions(first_expert, tokens, 1))
            self.first_expert = nl.ndarray((tokens, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=self.first_expert, src=loaded)
        self.num_experts = num_experts
        self.identity = nl.shared_identity_matrix(BLOCK, dtype=dtype)
        self.exact = nl.shared_identity_matrix(BLOCK, dtype=nl.float32)
        self.ones = all_ones()
        self.group = replica_group(groups)
        self.summands = len(groups[0]) * nl.num_programs()
        self.own = own
        self.tokens = rotation.shape[2] // lengths.shape[0]  # of each sequence
        self.shared = cache_groups != None
        self.cache_group = None
        if self.shared:
            assert nl.num_programs() == 2, "expected LNC=2 where ranks share a cache"
            self.cache_group = replica_group(cache_groups)
        self.query_tile = None


class Attention(nl.NKIObject):  # type: ignore[misc]
    """Attention of one layer: weights and cache are loaded first, where the kernel can wait for them least.

    Where a group of ranks shares the cache by its slots, one head a rank (flash decoding), every rank makes the queries
    of the whole group, so that no collective brings them: each core one half of the heads. One all-to-all brings each
    rank the parts of its own head. Otherwise a core goes through all of o_proj, with its part of the slots.
    """

    before: Any
    behind: Any
    early: Any
    core: Any

    def __init__(self, layer: Layer, step: Step) -> None:
        self.layer, self.step = layer, step
        self.before = None
        self.behind = None
        self.early = None
        self.core = None
        self.expanded = False

    def load_weights(self) -> None:
        """Load what comes before and behind the cache."""
        layer, step = self.layer, self.step
        q_b, q_b_scales, w_uk, w_uk_scales = layer.q_b, layer.q_b_scales, layer.w_uk, layer.w_uk_scales
        if step.shared:
            core = nl.program_id()
            q_b, w_uk = q_b[core], w_uk[core]
            if q_b_scales != None:
                q_b_scales = q_b_scales[core]
            if w_uk_scales != None:
                w_uk_scales = w_uk_scales[core]
            if step.query_tile == None:  # which all layers' q_b take in turn: two layers' would fill SBUF
                step.query_tile = nl.ndarray(q_b.shape, dtype=q_b.dtype, buffer=nl.sbuf)
        self.before = QueryProjection(layer, step, q_b, q_b_scales, w_uk, w_uk_scales)
        self.behind = OutputProjection(layer, not step.shared)

    def load_cache(self) -> None:
        """Load the cache and the early router."""
        layer, step, pages = self.layer, self.step, None
        latents, keys = layer.latents, layer.keys
        if step.runs != None:
            rank, rope = layer.w_uk.shape[3], step.rotation.shape[1]
            pages = Pages(layer.latents, layer.keys, step.runs, step.each, rank, rope)
            latents, keys = pages.latents, pages.keys
        first, count = share_of(step.attended // BLOCK)
        single = step.rotation.shape[2] * layer.w_uk.shape[0] == 1 and step.own == None
        self.expanded = single and count <= MOST_TILES
        if self.expanded:
            w_uk, w_uv = self.before.w_uk[0], self.behind.w_uv[0]
            self.core = ExpandedAttention(step, latents, keys, first, count, pages, w_uk, w_uv)
        else:
            self.core = LatentAttention(step, latents, keys, first, count, pages)
        self.early = EarlyLogits(layer.early_residual, layer.early_heads)

    def apply(self, hidden: Any, projected: Any, own: OwnColumns, following: Any = None) -> tuple[Any, Any]:
        """This core's summand of the residual behind attention and of the router's logits; and the queries.

        The summand is float32 [128, H/128 + E/128, B].

        Args:
            hidden: float32 [128, H/128, B], the residual.
            projected: float32 [128, ceil(N/128), B], down projections without the norm's scalar.
            own: this rank's columns of a part of the residual; those of both cores add up.
            following: the next layer's, whose cache may be loaded where a collective runs; None in the last.
        """
        if self.step.shared:
            return self._apply_shared(hidden, projected, own, following)
        step, chunks, batch = self.step, hidden.shape[1], hidden.shape[2]
        queries = self.before.queries(projected, hidden, not self.expanded)
        if step.tokens > 1:
            queries.join_tokens(step.tokens)
        share = residual_share(hidden, step.summands)
        factor = None
        if self.expanded:
            # o_proj does not wait for the other core.
            values, shares = self.core.attend_values(queries, step.softmax_scale, step.dtype, self.early, own)
            factor = shares.result()
        else:
            sums, shares = self.core.attend(queries, step.softmax_scale, step.dtype, True, self.early, own)
            blocks, heads = sums.shape[1], self.behind.heads
            shares = shares.result().reshape((BLOCK, batch, heads))
            values = self.behind.values(sums.reshape((BLOCK, blocks, batch * heads)), shares)
        logits = self.early.experts // BLOCK
        summand = nl.ndarray((BLOCK, chunks + logits, batch), dtype=nl.float32, buffer=nl.sbuf)
        self.early.take(values)
        self.behind.columns(values, summand[:, 0:chunks, :], share, factor)
        self.early.end(summand[:, chunks:, :], True, factor)
        return summand, queries

    def _apply_shared(self, hidden: Any, projected: Any, own: OwnColumns, following: Any) -> tuple[Any, Any]:
        """As `apply`; of o_proj each core has its share of the blocks."""
        step, chunks, batch = self.step, hidden.shape[1], hidden.shape[2]
        queries = self.before.queries(projected, hidden, True)
        _gather_heads(queries, batch)
        heads = queries.heads
        if step.tokens > 1:
            queries.join_tokens(step.tokens)
        if following != None:
            following.load_weights()
        sums, shares = self.core.attend(queries, step.softmax_scale, nl.float32, False)
        exchanged = self._exchange(sums, shares, heads)
        if following != None:
            following.load_cache()
        self.early.take_own(own)
        self.early.begin()
        logits = self.early.experts // BLOCK
        summand = nl.ndarray((BLOCK, chunks + logits, batch), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=summand, value=0.0, engine=nisa.engine.gpsimd)
        share = residual_share(hidden, step.summands)
        nisa.tensor_copy(dst=summand[:, 0:chunks, :], src=share, engine=nisa.engine.gpsimd)

        parts, logs = self._parts(exchanged, batch)
        values = self.behind.values(_merged(parts, logs, step.exact, step.dtype))
        self.early.take(values)
        first = self.behind.first
        end = first + self.behind.o_proj.shape[2] // BLOCK
        self.behind.columns(values, summand[:, first:end, :], share[:, first:end, :])
        self.early.end(summand[:, chunks:, :], False)
        return summand, queries

    def _exchange(self, sums: Any, shares: Any, each: int) -> Any:
        """This core's parts of all heads to the ranks of the heads: [ranks, cores, B, rank + 1] of this rank's head.

        Args:
            sums: float32 [128, rank / 128, B, heads], before they are divided by their weights.
            shares: weights and maxima of them.
            each: heads of a token; of several tokens a sequence the result has each token's.
        """
        step = self.step
        rows, blocks, batch, heads = sums.shape
        count, cores = batch * heads, nl.num_programs()
        size = blocks * BLOCK + 1
        logs = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=logs, op=nl.log, data=shares.weights)
        nisa.tensor_tensor(dst=logs, data1=logs, data2=shares.negative, op=nl.subtract)
        inverse = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.reciprocal(dst=inverse, data=shares.weights)
        divided = sums.reshape((rows, blocks, count))
        share = spread(inverse.reshape((rows, count)), blocks)
        nisa.tensor_tensor(dst=divided, data1=divided, data2=share, op=nl.multiply)
        turned = turn_columns(divided, step.exact)
        batch, heads = count // each, each
        in_rows = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        by_row = nl.ndarray((count, BLOCK), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=by_row, stationary=logs.reshape((rows, count)), moving=step.exact, is_transpose=True)
        nisa.tensor_copy(dst=in_rows, src=by_row[:, 0:1])
        source = nl.ndarray((heads, cores, batch, size), dtype=nl.float32, buffer=nl.shared_hbm)
        result = nl.ndarray((heads, cores, batch, size), dtype=nl.float32, buffer=nl.shared_hbm)
        first, outer = nl.program_id() * batch * size, cores * batch * size
        target = source.ap(pattern=[[size, batch], [outer, heads], [1, size - 1]], offset=first)
        nisa.dma_copy(dst=target, src=turned)
        target = source.ap(pattern=[[size, batch], [outer, heads], [1, 1]], offset=first + size - 1)
        nisa.dma_copy(dst=target, src=in_rows)
        nisa.core_barrier(source, (0, 1))
        ncc.all_to_all(srcs=[source], dsts=[result], replica_group=step.cache_group, collective_dim=0)
        return result

    def _parts(self, exchanged: Any, batch: int) -> tuple[Any, Any]:
        """[ranks * cores, B, rank] in SBUF, and the logs of their weights [B, ranks * cores]."""
        count, size = exchanged.shape[0] * exchanged.shape[1], exchanged.shape[3]
        sums = nl.ndarray((count, batch, size - 1), dtype=nl.float32, buffer=nl.sbuf)
        flat = exchanged.reshape((count, batch, size))
        nisa.dma_copy(dst=sums, src=flat[:, :, 0 : size - 1], engine=nisa.engine.scalar)
        logs = nl.ndarray((batch, count), dtype=nl.float32, buffer=nl.sbuf)
        by_sequence = flat.ap(pattern=[[size, batch], [batch * size, count]], offset=size - 1)
        nisa.dma_copy(dst=logs, src=by_sequence, engine=nisa.engine.scalar)
        return sums, logs


def _gather_heads(queries: Any, batch: int) -> None:
    """Queries of both cores' heads on both, core 0's first."""
    rows, chunks = queries.latent.shape[0], queries.latent.shape[1]
    used, copies, each = queries.rope.shape[0], queries.rope.shape[1], queries.rope.shape[3]
    count, size, dtype = batch * each, used // copies, queries.latent.dtype
    mine = nl.ndarray((rows, chunks + 1, batch, each), dtype=dtype, buffer=nl.sbuf)
    target = mine.ap(pattern=[[(chunks + 1) * count, rows], [count, chunks], [1, count]])
    nisa.tensor_copy(dst=target, src=queries.latent)
    assert used == rows, "expected 32 or 64 rotary values where ranks share a cache"
    for copy in range(copies):
        begin, end = copy * size, (copy + 1) * size
        nisa.tensor_copy(dst=mine[begin:end, chunks], src=queries.rope[begin:end, copy])
    theirs = from_other_core(mine)
    whole = nl.ndarray((rows, chunks, batch, 2, each), dtype=dtype, buffer=nl.sbuf)
    rope = rows_of_keys(size, batch, 2 * each, dtype)
    for core in range(2):
        part = mine if nl.program_id() == core else theirs
        engine = nisa.engine.vector if core == 0 else nisa.engine.scalar
        nisa.tensor_copy(dst=whole[:, :, :, core, :], src=part[:, 0:chunks], engine=engine)
        for copy in range(copies):
            begin, end = copy * size, (copy + 1) * size
            target = rope[begin:end, copy, :, core * each : (core + 1) * each]
            nisa.tensor_copy(dst=target, src=part[begin:end, chunks], engine=engine)
    queries.latent = whole.reshape((rows, chunks, 2 * count))
    queries.rope, queries.heads = rope, 2 * each


def _merged(parts: Any, logs: Any, exact: Any, dtype: Any) -> Any:
    """Parts of a softmax over slots that lie apart, as columns [128, rank / 128, n] of `dtype`.

    Args:
        parts: float32 [ranks, n, rank] in SBUF, each one's softmax times latents.
        logs: float32 [n, ranks] in SBUF, logs of the sums of exponentials; changed.
        exact: identity, float32 [128, 128].
        dtype: of the result.
    """
    ranks, count, rank = parts.shape
    # A rank a partition: the Tensor Engine weighs and sums them, and leaves columns.
    top = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=logs, axis=1)
    nisa.tensor_scalar(dst=logs, data=logs, op0=nl.subtract, operand0=top)
    shares = nl.ndarray((count, ranks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=shares, op=nl.exp, data=logs)
    total = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=shares, axis=1)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_scalar(dst=shares, data=shares, op0=nl.multiply, operand0=total)
    by_rank = nl.ndarray((ranks, count), dtype=nl.float32, buffer=nl.sbuf)
    turn_short_rows(shares, exact, by_rank)
    chunks = rank // BLOCK
    columns = nl.ndarray((BLOCK, chunks, count), dtype=nl.float32, buffer=nl.psum)
    for row in range(count):
        for chunk in range(chunks):
            nisa.nc_matmul(
                dst=columns[:, chunk, row : row + 1],
                stationary=parts[:, row, chunk * BLOCK : (chunk + 1) * BLOCK],
                moving=by_rank[:, row : row + 1],
                accumulate=False,
            )
    rounded = nl.ndarray((BLOCK, chunks, count), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rounded, src=columns)
    return rounded
