"""Where and how a model is to run: ranks, formats, lengths, and what one rank's memory and links are worth."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.plan.deployment import Deployment, LoraServing, VisionOptions
from kimi_k2.plan.roofline import GIB, Machine, Memory
from kimi_k2.plan.torch_native import BLOCK, TorchNativeOptions, blocks_at_once
from kimi_k2.plan.vision import tower_ranks
from kimi_k2.sharding.layout import Layout, ShardingPlan
from kimi_k2.sharding.plan import make_plan, without_nxdis

__all__ = ["GIB", "OURS", "PUBLISHED_PORT", "Arrangement", "Memory", "Target", "load_target", "make_target"]


# NxDI's EXTRA_RESERVED_SPACE (flash decoding) and KV_CACHE_PAD_FOR_SEQ_IDS_MASKING (continuous batching).
RESERVED_SLOTS = 128


@dataclass(frozen=True)
class Arrangement:
    """Choices of an implementation that the sharding plan does not show.

    Attributes:
        name: for a table.
        down_projections_split: q_a_proj and kv_a_proj_with_mqa are divided among the ranks.
        router_bytes: bytes an element of the router's weight.
        cache_copies: how often the compressed cache is held.
        selective_under_ep: decode with expert parallelism reads chosen experts only.
        dense_over_all_ranks: attention, dense MLP, shared expert, embedding and head are divided among all ranks, not
            only among those that share an expert.
    """

    name: str
    down_projections_split: bool = True
    router_bytes: int = 2
    cache_copies: int = 1
    selective_under_ep: bool = True
    dense_over_all_ranks: bool = True


OURS = Arrangement("ours")
# What pull request 131's modeling file declares: nn.Linear down projections, router_config.dtype float32, one entry of
# 576 values in each of the K and V slots, all local experts under expert parallelism, tp_degree 32 beside ep_degree 2.
PUBLISHED_PORT = Arrangement(
    "published port",
    down_projections_split=False,
    router_bytes=4,
    cache_copies=2,
    selective_under_ep=False,
    dense_over_all_ranks=False,
)


class DraftHead(Protocol):
    """What a head that drafts takes of a rank (`plan.drafts.Head`)."""

    def slot_bytes(self, target: Target) -> int:
        """Bytes of a token in its cache."""

    def weights(self, target: Target) -> int:
        """Bytes of its weights."""


@dataclass(frozen=True)
class Target:
    """One deployment.

    Attributes:
        name: preset.
        layout: ranks and formats of the weights.
        machine, memory: of one rank.
        batch: sequences.
        context: cache slots a sequence.
        prompt: tokens a sequence of the prefill that is modelled.
        prefill_batch: sequences of it; `batch` if None.
        cache_ranks: ranks that share one latent cache (flash decoding); 1 where each holds it whole.
        reserved_slots: cache slots a sequence behind the last position, which NxDI adds.
        continuous: NxDI's continuous batching.
        block_size: tokens a block of the blockwise prefill; None where tokens are grouped exactly.
        arrangement: see Arrangement.
        tower_ranks: ranks that share the vision tower; None for as many as can.
        tower_buckets: patches and frames of each compiled graph of the tower.
        prefill_rows_at_once: tokens of the experts' blocks that one operation of the PyTorch prefill takes.
        torch_native: options of vllm-neuron's torch-native line; None on NxDI and on GPUs.
        positions: tokens of a sequence in a decode step, drafts among them.
        head: that drafts them; None: none, or something without weights.
        lora: adapters beside the base weights.
    """

    name: str
    layout: Layout
    machine: Machine
    memory: Memory
    batch: int
    context: int
    prompt: int
    block_size: int | None = None
    arrangement: Arrangement = OURS
    prefill_batch: int | None = None
    cache_ranks: int = 1
    reserved_slots: int = 0
    continuous: bool = False
    tower_ranks: int | None = None
    tower_buckets: tuple[tuple[int, int], ...] = ()
    prefill_rows_at_once: int = 16384
    torch_native: TorchNativeOptions | None = None
    positions: int = 1
    head: DraftHead | None = None
    lora: LoraServing | None = None

    @property
    def rows(self) -> int:
        """Tokens of a decode step."""
        return self.batch * self.positions

    def sharding(self, config: KimiK2Config) -> ShardingPlan:
        """What the ranks hold.

        Raises:
            ConfigError: see `make_plan`.
        """
        plan = make_plan(config, self.layout)
        return plan if self.torch_native is None else without_nxdis(plan)

    @property
    def cache_itemsize(self) -> int:
        """Bytes of a cached value: BF16, or FP8 on vllm-neuron's torch-native line."""
        return 1 if self.torch_native is not None and self.torch_native.kv_cache_dtype == "fp8" else 2

    @property
    def prefill_sequences(self) -> int:
        """Sequences of one prefill."""
        return self.batch if self.prefill_batch is None else self.prefill_batch

    @property
    def decode_layers(self) -> bool:
        """Whether all MoE layers of a step run as one kernel, collectives inside."""
        return self.layout.layers

    @property
    def is_neuron(self) -> bool:
        """Whether it is a Trainium target."""
        return self.layout.target == "neuron"

    def with_lengths(self, context: int | None, batch: int | None, prompt: int | None) -> Target:
        """The same with other lengths; a prompt longer than the context is cut to it.

        Raises:
            ConfigError: a length is no integer or below 1, or the prompt is longer than the context.
        """
        for field, value in (("context", context), ("batch", batch), ("prompt", prompt)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"expected an integer, at least 1, got {value!r}", field=field)
        slots = context or self.context
        if prompt is not None and prompt > slots:
            raise ConfigError(f"expected at most the context ({slots}), got {prompt}", field="prompt")
        return replace(self, context=slots, batch=batch or self.batch, prompt=min(prompt or self.prompt, slots))


def make_target(deployment: Deployment, config: KimiK2Config) -> Target:
    """What the planner computes from, of a deployment; of a model without a tower, its text alone.

    Raises:
        ConfigError: it is not for LNC=2, of which alone the memory and rates are known here, or the model's tower has
            no such ranks or buckets.
    """
    if deployment.neuron_config.logical_nc_config != 2:
        raise ConfigError("expected 2: two ranks share a bank at LNC=1", field="neuron_config.logical_nc_config")
    images = deployment.vision if config.vision else None
    if images is not None:
        check_vision(images, config)
    neuron, options = deployment.hardware.target == "neuron", deployment.neuron_config
    line, columns = deployment.torch_native, max(config.moe_intermediate_size // deployment.moe_tp_degree, 1)
    reserved = options.flash_decoding_enabled or options.is_continuous_batching
    return Target(
        name=deployment.name,
        layout=deployment.layout(config),
        machine=deployment.hardware.machine,
        memory=deployment.hardware.memory,
        batch=deployment.batch_size,
        context=deployment.seq_len,
        prompt=deployment.max_context_length,
        block_size=BLOCK if line else options.blockwise_matmul_config.block_size if neuron else None,
        prefill_batch=1 if line else options.ctx_batch_size,
        cache_ranks=deployment.cache_ranks,
        reserved_slots=RESERVED_SLOTS if neuron and reserved else 0,
        continuous=options.is_continuous_batching,
        tower_ranks=images.tp_degree if images else None,
        tower_buckets=images.buckets if images else (),
        prefill_rows_at_once=BLOCK * blocks_at_once(columns) if line else options.prefill_rows_at_once,
        torch_native=line,
        positions=options.speculation_length or 1,
        lora=options.lora_config,
    )


def check_vision(options: VisionOptions, config: KimiK2Config) -> None:
    """Whether the tower of a model can be compiled so.

    Raises:
        ConfigError: the model has no tower, the ranks cannot share it, or a bucket is none of whole tokens.
    """
    vision = config.vision
    if vision is None:
        raise ConfigError("expected none in the preset: the model takes no images", field="vision")
    if tower_ranks(config, options.tp_degree) != options.tp_degree:
        raise ConfigError(f"{options.tp_degree} ranks cannot share the tower", field="vision.tp_degree")
    for patches, frames in options.buckets:
        rows, columns = vision.merge_kernel_size
        if frames > vision.pos_emb_time or patches % (frames * rows * columns):
            raise ConfigError(
                f"expected a multiple of {frames * rows * columns} patches in up to {vision.pos_emb_time} frames,"
                f" got {patches} in {frames}",
                field="vision.buckets",
            )


def check_context(config: KimiK2Config, tokens: int | None) -> None:
    """ConfigError if a model does not take sequences of so many tokens; None are the preset's."""
    most = config.max_position_embeddings
    if tokens is not None and tokens > most:
        raise ConfigError(f"expected at most max_position_embeddings ({most}), got {tokens}", field="max_model_len")


def load_target(name: str, config: KimiK2Config) -> Target:
    """The target of a preset in configs/, by name or path.

    Raises:
        ConfigError: there is no such preset, or it is wrong.
    """
    return make_target(Deployment.load(name, to_plan=True), config)
