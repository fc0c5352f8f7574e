"""Bytes that one rank holds, by what they are for. The sharding plan says which tensors; nothing is estimated twice.

And what conversion and load ask of a host: memory, disk, and what the checkpoint's index says of its size.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kimi_k2.checkpoint.index import INDEX_NAME, CheckpointIndex
from kimi_k2.config import KimiK2Config
from kimi_k2.files import is_there
from kimi_k2.plan.deployment import ADAPTERS
from kimi_k2.plan.scratch import BF16, Scratch, make_scratch
from kimi_k2.plan.target import GIB, Memory, Target
from kimi_k2.plan.vision import tower_rank_bytes
from kimi_k2.sharding.dry_run import dry_run
from kimi_k2.sharding.layout import PlannedTensor, ShardingPlan

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
        parts: bytes by category, weights and cache and what the runtime takes for certain.
        memory: what there is.
        scratch: what the graphs need beside (Trainium), or None; not part of `resident`.
    """

    parts: dict[str, int]
    memory: Memory
    scratch: Scratch | None = None

    @property
    def resident(self) -> int:
        """Bytes held all the time."""
        return sum(self.parts.values())

    @property
    def weights(self) -> int:
        """Bytes of tensors from the checkpoint."""
        return sum(size for name, size in self.parts.items() if name in WEIGHTS)

    @property
    def room(self) -> int:
        """Bytes left for scratch and activations; negative if what is resident does not fit."""
        return self.memory.usable - self.resident

    @property
    def needed(self) -> int:
        """Bytes held all the time, and scratch."""
        return self.resident + (self.scratch.nbytes if self.scratch else 0)

    @property
    def fits(self) -> bool:
        """Whether what is needed fits."""
        return self.needed <= self.memory.usable

    @property
    def verdict(self) -> str:
        """One line: fits, fits if scratch stays below what is left, or does not fit."""
        usable = self.memory.usable / GIB
        if not self.fits:
            return (
                f"does not fit: needs {self.needed / GIB:.1f} of {usable:.1f} GiB a rank,"
                f" {(self.needed - self.memory.usable) / GIB:.1f} too much"
            )
        if self.scratch is None:
            return f"fits: {self.needed / GIB:.1f} of {usable:.1f} GiB a rank"
        modelled, theirs = self.scratch.nbytes / GIB, self.scratch.reported
        if theirs.nbytes <= self.room:
            return (
                f"fits: {self.needed / GIB:.1f} of {usable:.1f} GiB a rank, {modelled:.1f} of them scratch (modelled)"
            )
        return (
            f"fits if scratch stays below {self.room / GIB:.1f} GiB a rank beside {self.resident / GIB:.1f} resident:"
            f" we model {modelled:.1f}, the published K2.5 port took {theirs.largest / GIB:.1f} at {theirs.longest:,}"
            f" tokens ({theirs.nbytes / GIB:.1f} here at that pace)"
        )

    @property
    def certain(self) -> bool:
        """Whether it fits with the published port's scratch too."""
        return self.fits and (self.scratch is None or self.scratch.reported.nbytes <= self.room)

    @property
    def largest(self) -> tuple[str, int]:
        """The largest category."""
        return max(self.parts.items(), key=lambda item: item[1])


def category(name: str) -> str:
    """Where a tensor of a rank's file belongs; names of both targets."""
    if "expert_mlps.mlp_op" in name or ".mlp.experts." in name:
        return "expert scales" if "scale" in name else "expert weights"
    if name.endswith(("rank_util.rank", "spmd_rank.rank", "local_expert_indices")) or "norm.weight" in name:
        return "norms and rank numbers"
    for part, where in (
        ("self_attn", "attention"),
        ("shared_experts", "shared experts"),
        ("mlp.router.", "router"),
        ("early_router.", "router"),
        ("early_qkv_a.", "attention"),
        ("mlp.gate.", "router"),
        (".mlp.", "dense MLP"),
    ):
        if part in name:
            return where
    return "embedding and lm_head"


def local_bytes(tensor: PlannedTensor) -> int:
    """Bytes of a tensor on one rank."""
    return prod(tensor.local_shape) * tensor.dtype.itemsize


def cache_bytes(config: KimiK2Config, target: Target, context: int | None = None) -> int:
    """The compressed cache as a rank holds it, with NxDI's reserved slots: cache_dim values a slot a layer in BF16.

    With flash decoding a rank holds its part of the positions, without it all; so of a draft head's cache.
    """
    slots = -(-(target.context if context is None else context) // target.cache_ranks) + target.reserved_slots
    drafts = target.head.slot_bytes(target) if target.head else 0
    return (_slot_bytes(config, target) + drafts) * target.batch * slots


def cache_bytes_read(config: KimiK2Config, target: Target, context: int) -> int:
    """What of it a decode step of a bucket of `context` positions reads."""
    return _slot_bytes(config, target) * target.batch * -(-context // target.cache_ranks)


def cache_tokens(config: KimiK2Config, target: Target, plan: MemoryPlan) -> int:
    """Of cache, over all sequences, that a rank has room for beside the rest of its plan; below 0: for none."""
    return (plan.memory.usable - plan.needed + plan.parts["KV cache"]) // _slot_bytes(config, target)


def _slot_bytes(config: KimiK2Config, target: Target) -> int:
    return config.num_hidden_layers * config.cache_dim * BF16 * target.arrangement.cache_copies


def memory_plan(config: KimiK2Config, target: Target, plan: ShardingPlan | None = None) -> MemoryPlan:
    """One rank's memory; tensors are counted exactly, Trainium's scratch is modelled, GPUs' workspaces a constant.

    Args:
        config: of the model.
        target: layout, batch, cache and dtypes.
        plan: of `target.sharding(config)`, if it is at hand.

    Raises:
        ConfigError: a size does not divide among the ranks.
    """
    plan = plan or target.sharding(config)
    parts = weight_parts(plan)
    parts |= arrangement_terms(config, target, parts)
    parts[TOWER] = tower_rank_bytes(config, target.tower_ranks or target.layout.ranks, target.is_neuron)
    if target.head is not None:
        parts["draft head"] = target.head.weights(target)
    if target.lora is not None:
        parts[ADAPTERS] = target.lora.rank_bytes(
            config, target.layout.ranks, target.batch, target.layout.dtype.itemsize
        )
    parts["KV cache"] = cache_bytes(config, target)
    parts.update({"runtime micro-code": MICROCODE_BYTES} if target.is_neuron else {WORKSPACE: WORKSPACE_BYTES})
    used = {name: size for name, size in parts.items() if size}
    return MemoryPlan(used, target.memory, make_scratch(config, target) if target.is_neuron else None)


def weight_parts(plan: ShardingPlan) -> dict[str, int]:
    """Bytes of one rank's file by category."""
    parts = dict.fromkeys(WEIGHTS, 0)
    for tensor in plan.tensors:
        parts[category(tensor.name)] += local_bytes(tensor)
    return parts


def arrangement_terms(config: KimiK2Config, target: Target, parts: dict[str, int]) -> dict[str, int]:
    """What an arrangement holds beyond the sharding plan's `parts`, each a named term."""
    terms = {}
    arrangement, ranks = target.arrangement, target.layout.ranks
    down = config.num_hidden_layers * config.qkv_a_dim * config.hidden_size * BF16
    if not arrangement.down_projections_split and target.is_neuron:
        terms["down projections held by every rank"] = down - down // ranks
    if not arrangement.dense_over_all_ranks and target.layout.moe_ep > 1:
        split = sum(parts[name] for name in ("attention", "shared experts", "dense MLP", "embedding and lm_head"))
        again = (split - down // ranks) * (target.layout.moe_ep - 1)
        terms[f"dense weights over {target.layout.moe_tp} ranks, not {ranks}"] = again
    if arrangement.router_bytes > BF16:
        moe = sum(config.is_moe_layer(layer) for layer in range(config.num_hidden_layers))
        elements = moe * config.n_routed_experts * config.hidden_size
        terms["router in float32"] = elements * (arrangement.router_bytes - BF16)
    return terms


def host_plan(config: KimiK2Config, target: Target) -> dict[str, int]:
    """Bytes read, written and held by conversion and load.

    `load_peak_memory_bound` is what all ranks' tensors take: NxDI keeps them until they are on the devices
    (application_base.py, `load_weights`), and one process a GPU keeps its own rank's.

    Raises:
        ConfigError: a size does not divide among the ranks.
    """
    sizes = dry_run(config, target.layout)
    return {
        "convert_reads": sizes.input_bytes,
        "convert_writes": sizes.output_bytes,
        "convert_disk": sizes.input_bytes + sizes.output_bytes,
        "convert_peak_memory_estimate": sizes.peak_memory,
        "load_reads": sizes.output_bytes,
        "load_peak_memory_bound": sizes.output_bytes,
    }


def read_index(directory: Path) -> dict[str, Any] | None:
    """Size and number of shards as the index states them; the shards need not be there. None without an index.

    Raises:
        CorruptHeaderError: see `CheckpointIndex.read`.
    """
    if not is_there(directory / INDEX_NAME):
        return None
    index = CheckpointIndex.read(directory)
    assert index.weight_map is not None
    return {"total_size": index.total_size, "shards": len(index.shards), "tensors": len(index.weight_map)}
