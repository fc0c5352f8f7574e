"""Bytes, floating-point operations and collectives of one decode step and one prefill, a rank, and a bound of its time.

The results are `GraphCounts`, in which HLO is counted too, so that both go through one roofline and can be compared.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.deployment import Target
from kimi_k2.plan.machines import TRN2_LNC2, Machine
from kimi_k2.plan.memory import (
    BF16,
    FLOAT32,
    blocks_at_once,
    cache_bytes,
    cache_bytes_read,
    category,
    expert_blocks,
    expert_share,
    held_as,
    local_bytes,
    local_experts,
    moe_layers,
    port_terms,
    weight_parts,
)
from kimi_k2.plan.torch_native import BLOCK
from kimi_k2.sharding.attention_tiles import NAME, OF_GROUP, SOURCES, in_place_of_linears
from kimi_k2.sharding.early_qkv_a import precedes_another
from kimi_k2.sharding.experts import PARTITIONS
from kimi_k2.sharding.layout import PlannedTensor, ShardingPlan


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind, group size and payload.

    Attributes:
        nbytes: bytes of one result a rank.
    """

    kind: str
    ranks: int
    nbytes: int


@dataclass
class GraphCounts:
    """What one execution of the graph costs a rank.

    Attributes:
        read: bytes read by parameter name.
        held: bytes of the parameters, by name.
        block_scaled: of what is read, experts whose block scales XLA multiplies their weights with.
        moved: bytes that gathers and scatters of intermediate arrays read and write, by operation.
        flops: of dots.
        collectives: how often each occurs.
    """

    read: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    moved: Counter[str] = field(default_factory=Counter)
    block_scaled: int = 0
    flops: int = 0
    collectives: Counter[Collective] = field(default_factory=Counter)

    def bytes_read(self, pattern: str = "") -> int:
        """Bytes read from parameters whose name `pattern` (a regular expression) is found in."""
        return sum(count for name, count in self.read.items() if re.search(pattern, name))

    @property
    def memory_bytes(self) -> int:
        """Bytes that pass through memory: of parameters and of intermediate arrays."""
        return self.bytes_read() + sum(self.moved.values())

    @property
    def collective_bytes(self) -> int:
        """Result bytes of all collectives a rank."""
        return sum(collective.nbytes * count for collective, count in self.collectives.items())


@dataclass(frozen=True)
class Roofline:
    """Modelled seconds of one execution: each part on its own, and the bound."""

    memory: float
    compute: float
    communication: float

    @property
    def alone(self) -> float:
        """Without communication: memory and compute overlap perfectly."""
        return max(self.memory, self.compute)

    @property
    def bound(self) -> float:
        """Communication overlaps neither."""
        return self.alone + self.communication


def roofline(counts: GraphCounts, machine: Machine = TRN2_LNC2) -> Roofline:
    """The modelled time of a graph on `machine`.

    A ring all-reduce over n ranks moves 2 (n - 1) / n of its bytes, all-gather and reduce-scatter (n - 1) / n of the
    larger side; each collective adds the assumed latency. Where a machine's were measured, these times stand for all.
    """
    moved = measured = 0.0
    calls = 0
    for collective, occurrences in counts.collectives.items():
        if collective.ranks == 1:
            continue
        share = (collective.ranks - 1) / collective.ranks
        larger = collective.nbytes * collective.ranks if collective.kind == "reduce-scatter" else collective.nbytes
        if machine.collectives:
            measured += occurrences * machine.seconds_of(larger)
            continue
        moved += occurrences * larger * share * (2 if collective.kind == "all-reduce" else 1)
        calls += occurrences
    return Roofline(
        memory=counts.memory_bytes / machine.bytes_per_second,
        compute=counts.flops / machine.flops_per_second,
        communication=measured + moved / machine.link_bytes_per_second + calls * machine.collective_latency,
    )


CORES = 2  # of LNC
_NORMS = (".q_a_layernorm.weight", ".kv_a_layernorm.weight")
_QUERIES = (f".{NAME}.q_b.", f".{NAME}.w_uk.")
# Of a layer in the kernel of whole layers.
_OF_LAYERS = (
    ".early_router.residual_weight", ".early_router.heads_weight", ".router.e_score_correction_bias",
    ".post_attention_layernorm.weight",
)  # fmt: skip


def _in_one_kernel(target: Target, layer: int) -> bool:
    """Whether a layer is one of those whose step is one kernel."""
    return target.layout.layers and target.config.is_moe_layer(layer)


def reads_attention(target: Target, tensor: PlannedTensor, decode: bool) -> bool:
    """Whether a stage reads a tensor, if it is a weight of attention that tiles stand for, or one of those tiles."""
    kernel, layout = decode and _in_one_kernel(target, tensor.layer), target.layout
    if f".{NAME}." not in tensor.name:
        return not kernel or not any(f".{name}." in tensor.name for name in SOURCES)
    of_group = any(f".{name}." in tensor.name for name in OF_GROUP)
    if not kernel:  # tiles of float values are all that there is
        return in_place_of_linears(layout.attention_tiles(target.config)) and not of_group
    return not layout.query_group or of_group or not any(name in tensor.name for name in _QUERIES)


def times_read(target: Target, tensor: PlannedTensor) -> int:
    """How often a step reads a tensor: 2 where both cores of a kernel do."""
    name = tensor.name
    if not _in_one_kernel(target, tensor.layer):
        return 1
    both = name.endswith((*_NORMS, *_OF_LAYERS)) or any(query in name for query in (*_QUERIES, f".{NAME}.w_uv."))
    # Where a group of ranks shares a cache each core has a half of o_proj.
    both |= f".{NAME}.o." in name and not target.layout.query_group
    return CORES if both else 1


SAMPLED_BYTES = (4, 8)  # on-device sampling gathers one float32 logit and one int64 index a rank


def decode_counts(target: Target, context: int | None = None) -> GraphCounts:
    """One token for each sequence, or several to be verified.

    Args:
        target: model, batch, cache and dtypes.
        context: cache slots that the graph reads; the target's whole cache if None. (On Neuron, the bucket.)
    """
    slots = target.context if context is None else context
    config, tokens = target.config, target.rows
    share = expert_share(target, tokens)
    of_all = tokens * config.num_experts_per_tok / config.n_routed_experts
    on_kernel = target.layout.layers and of_all < 1
    if on_kernel:
        share = of_all  # on average: the kernel skips the experts of other ranks
    plan = of_stage(target, decode=True)
    counts = _weights(target, plan, tokens, share)
    if on_kernel:
        for tensor in plan.tensors:  # the kernel reads a scale once for each partition that it multiplies
            if tensor.name.endswith(".shared_experts.gate_up_proj.scale"):
                counts.read[tensor.name] *= config.moe_intermediate_size * config.n_shared_experts // plan.layout.ranks
            elif tensor.name.endswith(".shared_experts.down_proj.scale"):
                counts.read[tensor.name] *= PARTITIONS
    for tensor in plan.tensors:
        counts.read[tensor.name] *= times_read(target, tensor)
    if target.is_neuron and held_as(target).block:
        counts.block_scaled = counts.bytes_read(r"\.mlp\.experts\.")
    counts.read["cache"] = cache_bytes_read(target, slots)
    counts.held["cache"] = cache_bytes(target)
    if target.torch_native:
        if not target.layout.layers:  # pages laid one after another, and read again
            counts.moved["gather"] = 2 * BF16 // target.cache_itemsize * counts.read["cache"]
        counts.moved["cache write"] = _cache_write(target, tokens)
    counts.flops = _linear_flops(plan, tokens, logits=tokens) + _expert_flops(target, tokens, decode=True)
    # With flash decoding a rank has the queries of its group, its part of the cache, and all of the step's own tokens.
    cores = target.cache_ranks
    counts.flops += _attention_flops(target, tokens * cores, slots // cores + target.positions)
    counts.collectives = _collectives(target, tokens, tokens, decode=True) + _flash_decoding(target, tokens)
    return counts


def prefill_counts(target: Target) -> GraphCounts:
    """One prompt of `target.prompt` tokens for each sequence."""
    config, sequences = target.config, target.prefill_sequences
    tokens = sequences * target.prompt
    blocks = expert_blocks(target, tokens)
    share = blocks / local_experts(target) if blocks else expert_share(target, tokens)
    plan = of_stage(target, decode=False)
    counts = _weights(target, plan, tokens, share)
    counts.held["cache"] = cache_bytes(target)
    keys = target.prompt
    if target.torch_native:
        # A segment's graph reads every page that a sequence may have; a whole prompt none.
        keys = target.context if target.torch_native.kv_segment_size_buckets else keys
        counts.read["cache"] = cache_bytes(replace(target, batch=1)) if keys > target.prompt else 0
        counts.moved["cache write"] = _cache_write(target, tokens)
    else:
        # NxDI's prefill graph takes the old cache in and rewrites it whole, unless the prompt fills it; with continuous
        # batching it writes the prompt's rows in place.
        filled = target.prompt == target.context and not target.reserved_slots
        rewritten = target.is_neuron and not (target.continuous or filled)
        counts.read["cache"] = cache_bytes(target) if rewritten else 0
        if target.continuous:
            written = cache_bytes_read(replace(target, batch=sequences), target.prompt)
            counts.moved["scatter"] = 2 * written  # updates read and written
    if target.tower_buckets:  # a row for every token, an image's or none
        counts.read["rows of images"] = tokens * config.hidden_size * BF16
    counts.flops = _linear_flops(plan, tokens, logits=sequences)
    counts.flops += _expert_flops(target, tokens, decode=False)
    # Every query is multiplied with every key and the upper half is masked away, in NxDI's form and in the plain model.
    counts.flops += _attention_flops(target, tokens, keys, expanded=target.is_neuron)
    counts.collectives = _collectives(target, tokens, sequences, decode=False)
    if blocks:
        choices = tokens * config.num_experts_per_tok
        if target.torch_native:  # a row for each place of a block, and one for each choice
            rows = blocks * BLOCK + choices
        else:  # each block gathers its tokens; of each group of blocks a token the output of each of its choices
            rows = blocks * (target.block_size or 0) + -(-blocks // blocks_at_once(target)) * choices
            # Each choice's token is scattered into a table.
            counts.moved["scatter"] += moe_layers(config) * choices * 2 * 8
        counts.moved["gather"] = moe_layers(config) * rows * config.hidden_size * BF16
    return counts


def _cache_write(target: Target, tokens: int) -> int:
    """Bytes of new rows, read and written by a kernel a layer: the scatters of PyTorch's form pass the whole pool."""
    return 2 * target.config.num_hidden_layers * tokens * target.config.cache_dim * target.cache_itemsize


def of_stage(target: Target, *, decode: bool) -> ShardingPlan:
    """The plan without what the stage does not read: folded weights at prefill, and at decode what they stand for."""
    unused: tuple[str, ...] = (".early_router.", ".early_qkv_a.")
    if decode:
        unused = ("router.linear_router.",) if target.layout.layers else ()

    def read(tensor: PlannedTensor) -> bool:
        if decode and target.layout.layers and tensor.name.endswith((".input_layernorm.weight", ".qkv_a_proj.weight")):
            return not precedes_another(target.config, tensor.layer - 1)
        return reads_attention(target, tensor, decode) and not any(name in tensor.name for name in unused)

    return replace(target.sharding, tensors=tuple(filter(read, target.sharding.tensors)))


def _weights(target: Target, plan: ShardingPlan, tokens: int, expert_share: float) -> GraphCounts:
    counts = GraphCounts()
    for tensor in plan.tensors:
        size, share = local_bytes(tensor), 1.0
        if category(tensor.name).startswith("expert"):
            share = expert_share
        elif "embed_tokens" in tensor.name:
            share = min(tokens / tensor.local_shape[0], 1.0)
        counts.held[tensor.name] = size
        counts.read[tensor.name] = round(size * share)
    for name, size in port_terms(target, weight_parts(plan)).items():
        counts.held[name] = counts.read[name] = size
    return counts


def _linear_flops(plan: ShardingPlan, tokens: int, logits: int) -> int:
    """2 M N K of every matrix outside the routed experts; kv_b_proj costs the same absorbed as applied."""
    total = 0
    for tensor in plan.tensors:
        name = tensor.name
        tiles = name.endswith("weight") and ("mlp.shared_experts." in name or ".self_attn.tiles." in name)
        matrix = len(tensor.shape) == 2 and "scale" not in name and "embed_tokens" not in name
        if matrix or tiles:
            packed = 8 if name.endswith("packed") else 1
            total += 2 * prod(tensor.local_shape) * packed * (logits if "lm_head" in name else tokens)
    return total


def _expert_flops(target: Target, tokens: int, *, decode: bool) -> int:
    config = target.config
    pairs, local = tokens * config.num_experts_per_tok, local_experts(target)
    if not target.is_neuron:
        rows = pairs // target.layout.moe_ep
    elif expert_share(target, tokens) < 1:
        rows = pairs  # one slot each, whether the expert is on this rank or not
    elif not decode and (blocks := expert_blocks(target, tokens)):
        rows = blocks * (target.block_size or 0)
    else:
        rows = tokens * local
    width = config.moe_intermediate_size // target.layout.moe_tp
    flops = moe_layers(config) * rows * 2 * 3 * config.hidden_size * width
    if decode and target.layout.layers:
        layers = sum(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers - 1))
        flops += layers * rows * 2 * width * config.qkv_a_dim
    return flops


def _attention_flops(target: Target, tokens: int, keys: int, *, expanded: bool = False) -> int:
    """Scores over cache_dim values and sums over kv_lora_rank, absorbed; or expanded, earlier ones made too."""
    config = target.config
    heads = config.num_attention_heads // target.layout.ranks
    each = 2 * (config.cache_dim + config.kv_lora_rank)
    if not expanded:
        return config.num_hidden_layers * heads * tokens * keys * each
    values = config.qk_nope_head_dim + config.v_head_dim
    used = tokens * keys * (values + config.qk_rope_head_dim)
    return config.num_hidden_layers * heads * 2 * (used + max(keys - tokens, 0) * config.kv_lora_rank * values)


def _counted(ranks: int, payloads: dict[str, list[int]]) -> Counter[Collective]:
    """Collectives of so many ranks, of each kind one for each payload."""
    return Counter(Collective(kind, ranks, nbytes) for kind, sizes in payloads.items() for nbytes in sizes)


def _collectives(target: Target, tokens: int, sampled: int, *, decode: bool) -> Counter[Collective]:
    """Two all-reduces a layer; on Neuron also the gathers of the split down projections, embedding and sampling.

    In the kernel of whole layers the all-reduce after attention carries the router's logits too, and that after the
    experts the next layer's down projections; each core brings a summand of its own, in blocks of 128 float32 values.
    """
    config, ranks, layers = target.config, target.layout.ranks, target.config.num_hidden_layers
    if ranks == 1:
        return Counter()
    hidden, line = tokens * config.hidden_size * BF16, target.torch_native
    if not target.is_neuron:  # the embedding is split by vocabulary
        gathered = [sampled * config.vocab_size * BF16]
        return _counted(ranks, {"all-reduce": [hidden] * (2 * layers + 1), "all-gather": gathered})
    early = moe_layers(config) if decode and target.layout.layers else 0
    riding = max(early - 1, 0)
    sums, scattered, gathers = [hidden] * (2 * (layers - early)), list[int](), [hidden]  # dense layers' are as ever
    if early:  # the last layer's has nothing riding
        logits, downs = (_summed(config, tokens, columns) for columns in (config.n_routed_experts, config.qkv_a_dim))
        sums += [logits] * early + [downs] * riding + [_summed(config, tokens, 0)]
    if line is None:
        gathers += [sampled * ranks * size for size in SAMPLED_BYTES]
    elif line.on_device_sampling_config is None:
        gathers += [sampled * config.vocab_size * FLOAT32]
    else:  # each rank's largest values and their numbers
        most = min(line.on_device_sampling_config["max_top_k"], config.vocab_size // ranks)
        gathers += [sampled * ranks * most * size for size in SAMPLED_BYTES]
    if line is not None and not decode and tokens % ranks == 0:  # a prompt's tokens are divided between the sums
        gathers += [hidden] * (2 * layers + 1)
        sums, scattered = [], [hidden // ranks] * (2 * layers)
    if not target.published_port:
        gathers += [tokens * config.qkv_a_dim * BF16] * (layers - riding)
    return _counted(ranks, {"all-reduce": sums, "reduce-scatter": scattered, "all-gather": gathers})


def _summed(config: KimiK2Config, tokens: int, columns: int) -> int:
    """Bytes of both cores' sums of hidden values and of `columns` that ride with them, float32, in whole blocks."""
    columns = -(-columns // PARTITIONS) * PARTITIONS
    return CORES * tokens * (config.hidden_size + columns) * FLOAT32


def _flash_decoding(target: Target, tokens: int) -> Counter[Collective]:
    """A layer's gathers of queries and of log-sum-exps over a group, and the scatter of the heads' sums.

    In the kernel of whole layers one all-to-all of both cores' parts.
    """
    config, cores = target.config, target.cache_ranks
    if cores == 1:
        return Counter()
    heads = tokens * config.num_attention_heads // target.layout.ranks
    inside = moe_layers(config) if target.layout.layers else 0
    apart = config.num_hidden_layers - inside
    payloads = {
        "all-to-all": [cores * CORES * tokens * (config.kv_lora_rank + 1) * FLOAT32] * inside,
        "all-gather": [heads * cores * config.cache_dim * BF16, heads * cores * cores * FLOAT32] * apart,
        "reduce-scatter": [heads * config.kv_lora_rank * FLOAT32] * apart,
    }
    return _counted(cores, payloads)


# Matrix-multiply instructions of prefill, a lower bound: the Tensor Engine takes 128 x 128 stationary values and up to
# 512 columns that move past them an instruction (trainium_inferentia2_arch.rst of aws-neuron-sdk). The compiler refuses
# a graph of too many (NCC_EVRF007, NCC_EBVF030, NCC_EXTP004): by its message over 5,000,000 (aws-neuron-sdk's issue
# 987); NxDI's models/qwen3_moe raises that to 15 million, as we do for long prompts. Whether it holds for a whole graph
# or for each part of the modular flow (`--modular-flow-mac-threshold=10`) is not documented.
STATIONARY, MOVING = 128, 512
LIMIT, RAISED_LIMIT = 5_000_000, 15_000_000
RAISED = f"--internal-max-instruction-limit={RAISED_LIMIT}"
LONG_PROMPT = 2048  # prefill of more tokens is compiled with RAISED


def prefill_instructions(target: Target) -> dict[str, Any] | None:
    """By part, in all, the limit, and what follows; None on a GPU."""
    if not target.is_neuron:
        return None
    config, tokens = target.config, target.prefill_sequences * target.prompt
    matmuls = {"linears": 0, "routed experts": 0, "attention": 0}
    for tensor in of_stage(target, decode=False).tensors:
        name, shape = tensor.name, tensor.local_shape
        if len(shape) < 2 or "scale" in name or "embed_tokens" in name or category(name) == "expert weights":
            continue
        rows = target.prefill_sequences if "lm_head" in name else tokens
        inner, outer = shape if len(shape) == 2 else (prod(shape) // STATIONARY, STATIONARY)  # tiles
        matmuls["linears"] += _matmuls(inner, outer, rows)
    hidden, width = config.hidden_size, config.moe_intermediate_size // target.layout.moe_tp
    blocks, rows = expert_blocks(target, tokens), target.block_size or 1
    if not blocks:
        blocks, rows = config.n_routed_experts // target.layout.moe_ep, tokens
    of_block = _matmuls(hidden, 2 * width, rows) + _matmuls(width, hidden, rows)
    matmuls["routed experts"] = moe_layers(config) * blocks * of_block
    heads, keys = config.num_attention_heads // target.layout.ranks, target.prompt
    scores = _matmuls(config.cache_dim, keys, target.prompt) + _matmuls(keys, config.kv_lora_rank, target.prompt)
    matmuls["attention"] = config.num_hidden_layers * heads * target.prefill_sequences * scores
    total = sum(matmuls.values())
    limit = RAISED_LIMIT if target.prompt > LONG_PROMPT else LIMIT
    return {"matmuls": matmuls, "total": total, "limit": limit, "follows": _follows(total, limit)}


def _matmuls(inner: int, outer: int, columns: int) -> int:
    return -(-inner // STATIONARY) * -(-outer // STATIONARY) * -(-columns // MOVING)


def _follows(total: int, limit: int) -> str:
    if total >= limit:
        return "more than the compiler takes: shorten max_context_length"
    if limit > LIMIT:
        return f"compile raises the limit for prompts of more than {LONG_PROMPT:,} tokens ({RAISED})"
    if 2 * total >= limit:
        return f"more than half of it by matmuls alone: should the compiler refuse the graph (NCC_EVRF007), {RAISED}"
    return "far from it"
