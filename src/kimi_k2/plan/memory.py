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
        """One line that says what is known and what is not."""
        if self.scratch is None:
            if not self.fits:
                return f"does not fit: {-self.room / GIB:.2f} GiB too much"
            return f"fits: {self.room / GIB:.2f} GiB left for scratch and activations"
        parts = f"{self.resident / GIB:.1f} GiB resident and {self.scratch.nbytes / GIB:.1f} of scratch (modelled)"
        if not self.fits:
            return f"does not fit: {parts}, {(self.needed - self.memory.usable) / GIB:.1f} GiB too much"
        return f"fits: {parts} of {self.memory.usable / GIB:.1f}"

    @property
    def caution(self) -> str | None:
        """What the published port's own scratch would mean for this plan, where that is more than there is."""
        reported = self.scratch.reported if self.scratch else None
        if reported is None or not self.fits or reported.nbytes <= self.room:
            return None
        how = "extrapolated to" if reported.extrapolated else "reported at"
        return (
            f"scratch as of the published K2.5 port, {how} this context, is {reported.nbytes / GIB:.1f} GiB and would"
            f" not fit in the {self.room / GIB:.1f} left; ours is modelled, not measured"
        )

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


def _slot_bytes(config: KimiK2Config, target: Target) -> int:
    return config.num_hidden_layers * config.cache_dim * BF16 * target.arrangement.cache_copies


def memory_plan(config: KimiK2Config, target: Target, plan: ShardingPlan | None = None) -> MemoryPlan:
    """One rank's memory; tensors are counted exactly, scratch is modelled on Trainium and left to `room` on a GPU.

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
    if target.is_neuron:
        parts["runtime micro-code"] = MICROCODE_BYTES
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
