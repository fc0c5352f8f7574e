"""Bytes that one rank holds, by what they are for. The sharding plan says which tensors; nothing is estimated twice.

And what conversion and load ask of a host, memory and disk; and what would make a plan fit: each suggestion is a plan
that was made and does.

Scratch of the compiled graphs is not measured by us: a fixed part, as reported for the published K2.5 port at its
shortest cache, and on top the arrays that are alive at once in our own graphs, modelled. Growth with the context as
reported for that port is shown beside it but not taken over: its decode graph is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import NamedTuple

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.plan.deployment import ADAPTERS, RESERVED_SLOTS, Target
from kimi_k2.plan.machines import GIB, INSTANCES
from kimi_k2.plan.published import data
from kimi_k2.plan.torch_native import BLOCK, KEYS, blocks_of
from kimi_k2.plan.vision import tower_rank_bytes
from kimi_k2.sharding.dry_run import dry_run
from kimi_k2.sharding.experts import expert_formats
from kimi_k2.sharding.layout import PlannedTensor, ShardingPlan


def moe_layers(config: KimiK2Config) -> int:
    """Layers with routed experts."""
    return sum(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers))


def local_experts(target: Target) -> int:
    """Routed experts of one expert-parallel group, of which each rank holds a part."""
    return target.config.n_routed_experts // target.layout.moe_ep


def expert_share(target: Target, tokens: int) -> float:
    """Share of a rank's experts that are read.

    On Neuron one static slot for every choice, until that is more than all; on a GPU the experts that somebody chose,
    on average if every expert is as likely as another.
    """
    config, local = target.config, local_experts(target)
    if not target.is_neuron:
        return 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** tokens
    if target.layout.moe_ep > 1 and target.published_port:
        return 1.0
    return min(tokens * config.num_experts_per_tok / local, 1.0)


def expert_blocks(target: Target, tokens: int) -> int:
    """Blocks of a blockwise prefill: full ones, and one that may be part empty for every local expert.

    0 where another path computes the experts: on a GPU, and for prompts too short to fill a block.
    """
    pairs = tokens * target.config.num_experts_per_tok
    if target.torch_native:
        return blocks_of(pairs, tokens, local_experts(target))
    if not target.is_neuron or not target.block_size or pairs < target.block_size:
        return 0
    if expert_share(target, tokens) < 1:
        return 0
    spare = local_experts(target) - 1
    return min(max(-(-(pairs - spare) // target.block_size), 0) + spare, pairs)


def blocks_at_once(target: Target) -> int:
    """Blocks of a group of the PyTorch prefill, groups of one size; 0 where prefill has no blocks."""
    if not target.block_size:
        return 0
    most = max(target.prefill_rows_at_once // target.block_size, 1)
    blocks = expert_blocks(target, target.prefill_sequences * target.prompt)
    return -(-blocks // -(-blocks // most)) if blocks and not target.torch_native else most


BF16, FLOAT32 = 2, 4
SMALL_ARRAYS = 1.1  # what the formulas leave out; test/nxd holds them to the lowered graphs


@dataclass(frozen=True)
class Reported:
    """Scratch of another implementation, as its source states it.

    Attributes:
        nbytes: interpolated at the context, or on at the pace of the last two lengths.
        longest, largest: tokens that it was last reported at, and its bytes there.
    """

    nbytes: int
    longest: int
    largest: int


@dataclass(frozen=True)
class Scratch:
    """What a Trainium deployment needs beside its weights and cache.

    Attributes:
        fixed: reported for another implementation, see the module's text.
        prefill, decode, tower: arrays alive at once in our graphs, modelled; 0 without graphs of the tower. The runtime
            shares scratch between graphs.
        reported: what that other implementation needs at this context.
    """

    fixed: int
    prefill: int
    decode: int
    tower: int
    reported: Reported

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.fixed + max(self.prefill, self.decode, self.tower)


def make_scratch(target: Target) -> Scratch:
    """The scratch of a Trainium target."""
    shortest, _ = data()["memory"]["scratch"]["points"][0]
    fixed = reported_scratch(shortest).nbytes
    return Scratch(fixed, *live_bytes(target), tower_live_bytes(target), reported_scratch(target.context))


def tower_live_bytes(target: Target) -> int:
    """The same for the largest graph of the vision tower, 0 without one: in attention, feed-forward or projector."""
    config, vision, ranks = target.config, target.config.vision, target.tower_ranks
    if vision is None or ranks is None:
        return 0
    width, fed = vision.hidden_size, vision.intermediate_size // ranks
    heads, most = vision.num_attention_heads // ranks, 0
    for patches, frames in target.tower_buckets:
        stream, tokens = patches * width * BF16, patches // (frames * vision.merged_size // width)
        # Residual, normed and rotated; scores before and after a step, and twice what tells images apart, all float32.
        attention = 3 * stream + (2 * heads + 2) * patches**2 * FLOAT32
        feed_forward = 4 * stream + 2 * patches * fed * BF16  # sums over ranks are float32
        # The projector's second matrix is transposed.
        projector = (vision.merged_size // ranks + tokens) * config.hidden_size * BF16 + patches * width * FLOAT32
        most = max(most, attention, feed_forward, projector)
    return int(SMALL_ARRAYS * most)


def live_bytes(target: Target) -> tuple[int, int]:
    """Bytes of the intermediate arrays that are alive at once in the prefill and in the decode graph, at most.

    Nothing is taken to be fused. Which arrays these are was read from lowered graphs (test/helpers/hlo.py).
    """
    prefill = max(_attention_prefill(target), _experts_prefill(target))
    decode = max(_head(target), _attention_decode(target), _experts_decode(target))
    return int(SMALL_ARRAYS * prefill), int(SMALL_ARRAYS * decode)


def _heads(target: Target) -> int:
    return target.config.num_attention_heads // target.layout.ranks


def _stream(target: Target, tokens: int) -> int:
    return tokens * target.config.hidden_size * BF16


def _gate_up(target: Target, experts: int) -> int:
    """Elements of `experts` gate and up matrices on one rank."""
    return experts * target.config.hidden_size * 2 * target.config.moe_intermediate_size // target.layout.moe_tp


class HeldAs(NamedTuple):
    """How an expert's weights are held.

    Attributes:
        itemsize: bytes a value.
        dequantized: they are multiplied by scales before their GEMM; of tiles gate and up are, and of blocks all beside
            at least as many tokens as a block has rows.
        scales_outputs: the GEMM's outputs are multiplied instead; of tiles those of down are.
        block: rows of a block of those that are dequantized and lie in none; 0 of others.
    """

    itemsize: int
    dequantized: bool
    scales_outputs: bool
    block: int


def held_as(target: Target) -> HeldAs:
    """How the expert format of `target` holds a rank's expert weights."""
    config = target.config
    rows, columns = config.moe_intermediate_size, config.hidden_size
    experts = target.layout.expert_format(config)
    specs = experts.specs(rows, columns, target.layout.dtype)
    # A scale an output channel multiplies the GEMM's result instead.
    finer = any(shape[-1] > 1 for name, (_, shape) in specs.items() if name != "weight")
    block = rows // specs["scale"][1][0] if finer and not experts.tiles else 0
    return HeldAs(specs["weight"][0].itemsize, finer, experts.tiles or not finer, block)


def _attention_prefill(target: Target) -> int:
    """Residual and normed hidden states, scores in float32 before and after masking, the mask."""
    tokens, line = target.prefill_sequences * target.prompt, target.torch_native
    keys = target.prompt
    if line:
        keys = line.kv_segment_size_buckets[0] if line.kv_segment_size_buckets else min(keys, KEYS)
    scores = tokens * _heads(target) * keys
    return 2 * _stream(target, tokens) + scores * (2 * FLOAT32 + 1)


def _experts_prefill(target: Target) -> int:
    """The PyTorch form, a group of blocks at a time: hidden states thrice, the float32 sum, and the worst step."""
    config, tokens = target.config, target.prefill_sequences * target.prompt
    blocks, all_blocks = blocks_at_once(target), expert_blocks(target, tokens)
    rows = blocks * (target.block_size or 0) * config.hidden_size
    # One group is summed when its blocks are done.
    total = 0 if blocks and blocks == all_blocks else tokens * config.hidden_size * FLOAT32
    stored, step = held_as(target), 0
    if target.torch_native:
        # All blocks' rows and a group's products before and after their scales; then their outputs, and every choice's
        # before and after it is float32.
        products = (
            rows * 2 * config.moe_intermediate_size // (target.layout.moe_tp * stored.block) if stored.block else rows
        )
        choices, every = tokens * config.num_experts_per_tok, all_blocks * BLOCK * BF16
        step = every * config.hidden_size + 2 * products * FLOAT32
        step = max(step, (every + choices * (BF16 + FLOAT32)) * config.hidden_size)
    elif stored.dequantized:
        step = 2 * _gate_up(target, blocks) * FLOAT32 + rows * BF16
    if stored.scales_outputs and not target.torch_native:
        step = max(step, 2 * rows * FLOAT32)  # the blocks' outputs in float32, before and after their scales
    return 3 * _stream(target, tokens) + total + step


def _head(target: Target) -> int:
    """lm_head, transposed."""
    return target.config.vocab_size // target.layout.ranks * target.config.hidden_size * BF16


def _attention_decode(target: Target) -> int:
    """The cache of one layer, cut into its two parts, and the scores; flash decoding has the heads of its group."""
    slots = target.batch * target.context // target.cache_ranks
    heads = _heads(target) * target.cache_ranks * target.positions
    return slots * (target.config.cache_dim * BF16 + heads * 2 * FLOAT32)


def _experts_decode(target: Target) -> int:
    """Gate and up of the experts that the step reads: gathered, and as they are multiplied. A kernel does neither."""
    config, local = target.config, local_experts(target)
    slots = target.rows * config.num_experts_per_tok
    if target.layout.layers and slots < config.n_routed_experts:
        return 0
    elements, stored = _gate_up(target, min(slots, local)), held_as(target)
    tokens = 1 if slots < local else target.rows
    if stored.dequantized and tokens >= stored.block:
        return 2 * elements * FLOAT32  # before and after the scale
    products = elements // stored.block * tokens if stored.block else 0  # before and after a block's scale
    return elements * ((stored.itemsize if slots < local else 0) + BF16) + 2 * products * FLOAT32


def reported_scratch(context: int) -> Reported:
    """Piecewise linear through the points reported of the published K2.5 port on 64 ranks: cache length and GiB."""
    lengths, sizes = zip(*data()["memory"]["scratch"]["points"], strict=True)
    return Reported(int(max(between(lengths, sizes, context), 0.0) * GIB), lengths[-1], int(sizes[-1] * GIB))


def between(points: Sequence[float], values: Sequence[float], at: float) -> float:
    """Piecewise linear through ascending points; beyond them along the first or last section."""
    upper = next((n for n, point in enumerate(points) if n and at <= point), len(points) - 1)
    low, high = points[upper - 1], points[upper]
    return values[upper - 1] + (values[upper] - values[upper - 1]) * (at - low) / (high - low)


# AWS Neuron documentation, "Neuron device memory": micro-code takes 96 MB of each physical core.
MICROCODE_BYTES = 2 * 96 * 10**6
# Of a GPU, beside weights and cache: graphs of prompts and steps of 8,192 tokens, each about 1.1 GB beside K2-0905's
# slices, and what the allocator keeps. Measured inside vLLM on an H200.
WORKSPACE, WORKSPACE_BYTES = "engine's workspaces", 3 * 10**9

WEIGHTS = (
    "expert weights",
    "expert scales",
    "attention",
    "shared experts",
    "dense MLP",
    "router",
    "embedding and lm_head",
    "norms and rank numbers",
)
TOWER = "vision tower"


@dataclass(frozen=True)
class MemoryPlan:
    """One rank's memory.

    Attributes:
        target: what is planned.
        parts: bytes by category, weights and cache and what the runtime takes for certain.
        scratch: what the graphs need beside (Trainium), or None; not part of `resident`.
    """

    target: Target
    parts: dict[str, int]
    scratch: Scratch | None = None

    @property
    def resident(self) -> int:
        """Bytes held all the time."""
        return sum(self.parts.values())

    @property
    def room(self) -> int:
        """Bytes left for scratch and activations; negative if what is resident does not fit."""
        return self.target.memory.usable - self.resident

    @property
    def needed(self) -> int:
        """Bytes held all the time, and scratch."""
        return self.resident + (self.scratch.nbytes if self.scratch else 0)

    @property
    def fits(self) -> bool:
        """Whether what is needed fits."""
        return self.needed <= self.target.memory.usable

    @property
    def verdict(self) -> str:
        """One line: fits, fits if scratch stays below what is left, or does not fit."""
        usable = self.target.memory.usable / GIB
        if not self.fits:
            return (
                f"does not fit: needs {self.needed / GIB:.1f} of {usable:.1f} GiB a rank,"
                f" {(self.needed - self.target.memory.usable) / GIB:.1f} too much"
            )
        modelled = self.scratch.nbytes / GIB if self.scratch else 0.0
        if self.scratch is None or self.certain:
            scratch = f", {modelled:.1f} of them scratch (modelled)" if self.scratch else ""
            return f"fits: {self.needed / GIB:.1f} of {usable:.1f} GiB a rank{scratch}"
        theirs = self.scratch.reported
        return (
            f"fits if scratch stays below {self.room / GIB:.1f} GiB a rank beside {self.resident / GIB:.1f} resident:"
            f" we model {modelled:.1f}, the published K2.5 port took {theirs.largest / GIB:.1f} at {theirs.longest:,}"
            f" tokens ({theirs.nbytes / GIB:.1f} here at that pace)"
        )

    @property
    def certain(self) -> bool:
        """Whether it fits with the published port's scratch too."""
        return self.fits and (self.scratch is None or self.scratch.reported.nbytes <= self.room)


def category(name: str) -> str:
    """Where a tensor of a rank's file belongs; names of both targets."""
    if ".mlp.experts." in name:
        return "expert scales" if "scale" in name else "expert weights"
    if name == "rank_util.rank" or "norm.weight" in name:
        return "norms and rank numbers"
    for word, where in (
        ("self_attn", "attention"),
        ("shared_experts", "shared experts"),
        ("mlp.router.", "router"),
        ("early_router.", "router"),
        ("early_qkv_a.", "attention"),
        ("mlp.gate.", "router"),
        (".mlp.", "dense MLP"),
    ):
        if word in name:
            return where
    return "embedding and lm_head"


def local_bytes(tensor: PlannedTensor) -> int:
    """Bytes of a tensor on one rank."""
    return prod(tensor.local_shape) * tensor.dtype.itemsize


def cache_bytes(target: Target, context: int | None = None) -> int:
    """The compressed cache as a rank holds it, with NxDI's reserved slots: cache_dim values a slot a layer.

    With flash decoding a rank holds its part of the positions, without it all; so of a draft head's cache.
    """
    slots = -(-(target.context if context is None else context) // target.cache_ranks) + target.reserved_slots
    drafts = target.head.slot_bytes(target) if target.head else 0
    return (_slot_bytes(target) + drafts) * target.batch * slots


def cache_bytes_read(target: Target, context: int) -> int:
    """What of it a decode step of a bucket of `context` positions reads."""
    return _slot_bytes(target) * target.batch * -(-context // target.cache_ranks)


def cache_tokens(plan: MemoryPlan) -> int:
    """Of cache, over all sequences, that a rank has room for beside the rest of its plan; below 0: for none."""
    return (plan.target.memory.usable - plan.needed + plan.parts["KV cache"]) // _slot_bytes(plan.target)


def _slot_bytes(target: Target) -> int:
    slot = target.config.num_hidden_layers * target.config.cache_dim
    return slot * target.cache_itemsize * (2 if target.published_port else 1)


def memory_plan(target: Target) -> MemoryPlan:
    """One rank's memory; tensors are counted exactly, Trainium's scratch is modelled, GPUs' workspaces a constant.

    Raises:
        ConfigError: a size does not divide among the ranks.
    """
    config, parts = target.config, weight_parts(target.sharding)
    parts |= port_terms(target, parts)
    if config.vision is not None:
        parts[TOWER] = tower_rank_bytes(config, target.tower_ranks or target.layout.ranks, target.is_neuron)
    if target.head is not None:
        parts["draft head"] = target.head.weights(target)
    if target.lora is not None:
        parts[ADAPTERS] = target.lora.rank_bytes(target)
    parts["KV cache"] = cache_bytes(target)
    parts.update({"runtime micro-code": MICROCODE_BYTES} if target.is_neuron else {WORKSPACE: WORKSPACE_BYTES})
    used = {name: size for name, size in parts.items() if size}
    return MemoryPlan(target, used, make_scratch(target) if target.is_neuron else None)


def weight_parts(plan: ShardingPlan) -> dict[str, int]:
    """Bytes of one rank's file by category."""
    parts = dict.fromkeys(WEIGHTS, 0)
    for tensor in plan.tensors:
        parts[category(tensor.name)] += local_bytes(tensor)
    return parts


def port_terms(target: Target, parts: dict[str, int]) -> dict[str, int]:
    """What the published port holds beyond the sharding plan's `parts`, each a named term; of ours nothing."""
    terms, config, ranks = dict[str, int](), target.config, target.layout.ranks
    if not target.published_port:
        return terms
    down = config.num_hidden_layers * config.qkv_a_dim * config.hidden_size * BF16
    terms["down projections held by every rank"] = down - down // ranks
    if target.layout.moe_ep > 1:
        split = sum(parts[name] for name in ("attention", "shared experts", "dense MLP", "embedding and lm_head"))
        again = (split - down // ranks) * (target.layout.moe_ep - 1)
        terms[f"dense weights over {target.layout.moe_tp} ranks, not {ranks}"] = again
    router = moe_layers(config) * config.n_routed_experts * config.hidden_size
    terms["router in float32"] = router * (FLOAT32 - BF16)
    return terms


def host_plan(target: Target) -> dict[str, int]:
    """Bytes read, written and held by conversion and load.

    `load_peak_memory_bound` is what all ranks' tensors take: NxDI keeps them until they are on the devices
    (application_base.py, `load_weights`), and one process a GPU keeps its own rank's.

    Raises:
        ConfigError: a size does not divide among the ranks.
    """
    sizes = dry_run(target.config, target.layout)
    return {
        "convert_reads": sizes.input_bytes,
        "convert_writes": sizes.output_bytes,
        "convert_disk": sizes.input_bytes + sizes.output_bytes,
        "convert_peak_memory_estimate": sizes.peak_memory,
        "load_reads": sizes.output_bytes,
        "load_peak_memory_bound": sizes.output_bytes,
    }


MAX_RANKS = {instance.target: instance.ranks for instance in INSTANCES.values()}


def longest_context(plan: MemoryPlan) -> int:
    """Cache slots a sequence with which the plan fits, scratch included; at most max_position_embeddings."""

    def fits(context: int) -> bool:
        prompt = min(plan.target.prompt, context)
        return _fits_as(plan, replace(plan.target, context=context, prompt=prompt))

    return _last(fits, plan.target.config.max_position_embeddings)


def longest_context_with_scratch(plan: MemoryPlan) -> int | None:
    """The same with scratch as it was reported for the published port; None where nothing was reported."""
    if plan.scratch is None:
        return None
    room = plan.room + plan.parts["KV cache"]

    def fits(context: int) -> bool:
        return cache_bytes(plan.target, context) + reported_scratch(context).nbytes <= room

    return _last(fits, longest_context(plan))


def _fits_as(plan: MemoryPlan, target: Target) -> bool:
    """Whether `plan` does with the cache and scratch of another batch or context."""
    scratch = make_scratch(target).nbytes if target.is_neuron else 0
    return cache_bytes(target) + scratch <= plan.room + plan.parts["KV cache"]


def _last(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, if all smaller ones do; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def advice(plan: MemoryPlan) -> list[str]:
    """Changes, one at a time, with which the plan fits; empty if it fits already.

    When no single change is enough, that is said with what the machine can hold at most.
    """
    if plan.fits:
        return []
    changes, target = [], plan.target
    if (length := longest_context(plan)) >= 1:
        changes.append(f"a context of at most {length:,} tokens instead of {target.context:,}")
        if (batch := _last(lambda batch: _fits_as(plan, replace(target, batch=batch)), 4096)) >= 1:
            changes.append(f"a batch of at most {batch} instead of {target.batch}")
    changes += islice(_fitting(_flash_decoding(target)), 1)
    changes += _fitting(_alternatives(target))
    if not changes:
        ranks = MAX_RANKS[target.layout.target]
        whole = target.memory.usable * ranks
        changes.append(
            f"nothing that is known here: all {ranks} ranks of one host have"
            f" {whole / GIB:,.0f} GiB together; use a smaller format or several hosts"
        )
    return changes


def _fitting(changes: Iterator[tuple[str, Target]]) -> Iterator[str]:
    """The changes with which a plan fits, and what it then needs."""
    for words, target in changes:
        with suppress(ConfigError):
            if (plan := memory_plan(target)).fits:
                yield f"{words} ({plan.needed / GIB:.1f} of {target.memory.usable / GIB:.1f} GiB)"


def _flash_decoding(target: Target) -> Iterator[tuple[str, Target]]:
    cores = 2 * target.cache_ranks
    while target.is_neuron and target.torch_native is None and target.layout.ranks % cores == 0:
        split = replace(target, cache_ranks=cores, reserved_slots=RESERVED_SLOTS)
        yield f"the cache split over {cores} ranks (flash decoding)", split
        cores *= 2


def _alternatives(target: Target) -> Iterator[tuple[str, Target]]:
    layout = target.layout
    if layout.target == "neuron":
        for experts, held in expert_formats().items():
            if experts != layout.experts and held.quantization_type and not (held.tiles or layout.layers):
                yield f"experts in {experts} FP8", replace(target, layout=replace(layout, experts=experts))
    elif layout.experts == "bf16":
        yield "the checkpoint's own format", replace(target, layout=replace(layout, experts="stored"))
    tensor_parallel = layout.moe_tp
    while tensor_parallel * layout.moe_ep < MAX_RANKS[layout.target]:
        tensor_parallel *= 2
        wider = replace(layout, moe_tp=tensor_parallel)
        yield f"{wider.ranks} ranks instead of {layout.ranks}", replace(target, layout=wider)
