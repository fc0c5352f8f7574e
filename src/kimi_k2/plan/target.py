"""Where and how a model is to run: ranks, formats, lengths, and what one rank's memory and links are worth."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.neuron.preset import CONFIGS, NeuronPreset
from kimi_k2.plan.roofline import TRN2_LNC2, Machine
from kimi_k2.sharding.layout import ExpertOutput, Layout

GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """One rank's memory in bytes.

    Attributes:
        total: what the device has.
        usable: what programs were seen to get of it.
        source: of both figures.
    """

    total: int
    usable: int
    source: str


# A bank is one of a chip's four HBM stacks. At LNC=2 one logical core has it to itself; at LNC=1 two share it.
TRN2_BANK = Memory(
    total=24 * GIB,
    usable=int(23.363 * GIB),
    source="AWS Neuron documentation: 96 GiB a chip, about 24 GiB a rank at LNC=2; 23.363 of it usable as reported in"
    " the README of the published Kimi-K2.5 port",
)
H200_MEMORY = Memory(total=141 * 10**9, usable=141 * 10**9, source="NVIDIA H200 specification: 141 GB HBM3e")

# Peak rates of NVIDIA's H200 SXM specification: 4.8 TB/s, 989 BF16 TFLOP/s dense, NVLink 900 GB/s both ways together.
H200 = Machine(
    name="one NVIDIA H200 SXM",
    bytes_per_second=4.8e12,
    flops_per_second=989e12,
    link_bytes_per_second=450e9,
    collective_latency=10e-6,
    source="NVIDIA H200 specification (peak rates); collective latency assumed",
)


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


@dataclass(frozen=True)
class Target:
    """One deployment.

    Attributes:
        name: preset.
        layout: ranks and formats of the weights.
        machine, memory: of one rank.
        batch: sequences.
        context: cache slots a sequence.
        prompt: tokens of the prefill that is modelled.
        block_size: tokens a block of the blockwise prefill; None where tokens are grouped exactly.
        arrangement: see Arrangement.
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

    @property
    def is_neuron(self) -> bool:
        """Whether it is a Trainium target."""
        return self.layout.target == "neuron"

    def with_lengths(self, context: int | None, batch: int | None, prompt: int | None) -> Target:
        """The same with other lengths; a prompt longer than the context is cut to it.

        Raises:
            ConfigError: a length is below 1, or the prompt is longer than the context.
        """
        for field, value in (("context", context), ("batch", batch), ("prompt", prompt)):
            if value is not None and value < 1:
                raise ConfigError(f"expected at least 1, got {value}", field=field)
        slots = context or self.context
        if prompt is not None and prompt > slots:
            raise ConfigError(f"expected at most the context ({slots}), got {prompt}", field="prompt")
        return replace(self, context=slots, batch=batch or self.batch, prompt=min(prompt or self.prompt, slots))


def neuron_target(preset: NeuronPreset) -> Target:
    """The target that a preset of configs/ describes.

    Raises:
        ConfigError: it is not for LNC=2, of which alone the memory and rates are known here.
    """
    options = preset.neuron_config
    if options.get("logical_nc_config", 2) != 2:
        raise ConfigError("expected 2: two ranks share a bank at LNC=1", field="neuron_config.logical_nc_config")
    formats: dict[str, ExpertOutput] = {
        "bf16": "bf16", "blockwise_fp8": "blockwise", "per_channel_fp8": "per_channel",
    }  # fmt: skip
    blockwise = options.get("blockwise_matmul_config", {})
    layout = Layout(
        preset.moe_tp,
        preset.moe_ep,
        experts=formats[preset.experts],
        spmd_rank=preset.moe_ep > 1 or blockwise.get("parallelize_token_to_block_mapping", False),
    )
    return Target(
        name=preset.name,
        layout=layout,
        machine=TRN2_LNC2,
        memory=TRN2_BANK,
        batch=options["batch_size"],
        context=options["seq_len"],
        prompt=min(options.get("max_context_length", options["seq_len"]), options["seq_len"]),
        block_size=blockwise.get("block_size", 512),
    )


_H200 = re.compile(r"h200-tp(\d+)")


def load_target(name: str, config: KimiK2Config) -> Target:
    """A target by name: a preset in configs/ (or a path to one), or h200-tpN for N GPUs of one host.

    Raises:
        ConfigError: there is no such target.
    """
    if match := _H200.fullmatch(name):
        experts: ExpertOutput = "stored" if config.quantization else "bf16"
        layout = Layout(int(match[1]), 1, "cuda", experts)
        return Target(name, layout, H200, H200_MEMORY, batch=1, context=4096, prompt=2048)
    try:
        return neuron_target(NeuronPreset.load(name))
    except ConfigError as error:
        if error.message.startswith("no such preset"):
            known = ", ".join([*sorted(file.stem for file in CONFIGS.glob("trn2-*.yaml")), "h200-tp1 to h200-tp8"])
            raise ConfigError(f"no target '{name}'; known: {known}", field="preset") from None
        raise
