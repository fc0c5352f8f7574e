"""What a deployment asks for, obeyed or refused by name: NeuronConfig, and how its ranks share the model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.sharding.experts import expert_formats
from kimi_k2.sharding.layout import Layout, PlannedTensor
from kimi_k2.sharding.plan import make_plan, without_nxdis

# Formats of the routed experts that `neuron_config.quantization` can name, see `sharding.experts`.
FORMATS = ("per_channel", "blockwise", "tiles", "bf16")
DEFAULT_FORMAT = "per_channel"

# The line's own Eagle3 head: those of MLA it does not have (`model/registry.py`).
HEADS = ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")

# Fields that this model reads, and those that concern the runner alone, whatever their value.
_READ = {"ep_degree", "on_device_sampling_config", "max_logprobs", "quantization"}
_OF_THE_RUNNER = {
    "num_batched_tokens_buckets",
    "num_seqs_buckets",
    "kv_segment_size_buckets",
    "decode_context_length_buckets",
    "enable_structured_outputs",
    "debug_logits_dir",
    "tensor_capture",
    "tensor_replacement",
    "all2all_backend",
}


def check_neuron_config(neuron_config: Any) -> None:
    """Refuse what the model would ignore: a field that is neither read here nor the runner's, set to something.

    Raises:
        ConfigError: naming the field.
    """
    if neuron_config is None:
        return
    for field in dataclasses.fields(neuron_config):
        name = field.name
        # Names with an underscore are the platform's notes to itself.
        if name in _READ or name in _OF_THE_RUNNER or name.startswith("_"):
            continue
        default = field.default if field.default is not dataclasses.MISSING else None
        value = getattr(neuron_config, name)
        if value not in (default, None):
            raise ConfigError(f"Kimi-K2 has no such option here: expected {default!r}, got {value!r}", field=name)
    if (quantization := neuron_config.quantization) not in (None, *FORMATS):
        raise ConfigError(f"expected one of {', '.join(FORMATS)}, got {quantization!r}", field="quantization")


@dataclass(frozen=True)
class Ranks:
    """How ranks share the model, and which of them this is.

    Attributes:
        tp: vLLM's coordinator of the ranks that share heads (`all_gather`, `reduce_scatter`, `all_reduce`).
        dp: that of the same rank of all data-parallel replicas, where experts are divided among these too; else None.
        moe_ep: groups that the experts are divided among.
    """

    tp: Any
    dp: Any
    moe_ep: int

    @classmethod
    def of_process(cls, neuron_config: Any) -> Ranks:
        """Of this process, from vLLM's and the line's groups.

        Raises:
            ConfigError: the line's groups do not fit `ep_degree`, or divide a sequence's cache; drafts that are not of
                its Eagle3 head, or scheduled before they are judged.
        """
        from vllm.config import get_current_vllm_config_or_none
        from vllm.distributed.parallel_state import get_dcp_group, get_dp_group, get_tp_group
        from vllm_neuron.parallel.neuron_parallel_state import get_neuron_ep_degree

        engine = get_current_vllm_config_or_none()  # the worker sets it while the model is made
        if (drafts := getattr(engine, "speculative_config", None)) is not None:
            if (head := drafts.draft_model_config.hf_config.architectures[0]) not in HEADS:
                raise ConfigError(f"expected one of {', '.join(HEADS)}, got {head}", field="speculative_config.model")
            # A step is then prepared as if all drafts before it had been accepted, and put right inside the graphs of
            # the line's own models (`async_speculative_decoding`).
            if engine.scheduler_config.async_scheduling:
                raise ConfigError("expected false beside drafts: --no-async-scheduling", field="async_scheduling")
        tp, dp, degree = get_tp_group(), get_dp_group(), int(get_neuron_ep_degree())
        if (parts := get_dcp_group().world_size) > 1:
            raise ConfigError(f"expected 1, got {parts}", field="decode_context_parallel_size")
        asked = getattr(neuron_config, "ep_degree", degree)
        if asked not in (1, degree):
            raise ConfigError(f"{asked}, but the line's groups have {degree}", field="ep_degree")
        replicas = dp.world_size if degree > 1 else 1
        if replicas > 1 and degree != tp.world_size * replicas:
            raise ConfigError(
                f"expected {tp.world_size * replicas}, all ranks of all replicas, got {degree}", field="ep_degree"
            )
        if degree > 1 and tp.world_size * replicas % degree:
            raise ConfigError(f"{degree} does not divide {tp.world_size} ranks", field="ep_degree")
        return cls(tp, dp if replicas > 1 else None, degree)

    @property
    def of_moe(self) -> int:
        """Ranks that the experts are divided among."""
        return int(self.tp.world_size * (1 if self.dp is None else self.dp.world_size))

    @property
    def rank(self) -> int:
        """This rank among those that share attention."""
        return int(self.tp.rank_in_group)

    @property
    def moe_rank(self) -> int:
        """This rank among `of_moe`."""
        replica = 0 if self.dp is None else int(self.dp.rank_in_group)
        return replica * int(self.tp.world_size) + self.rank


def layout_of(ranks: Ranks, experts: str, dtype: torch.dtype) -> Layout:
    """The layout of a conversion (`kimi-k2 convert --target neuron`) whose files these ranks can load."""
    return Layout(ranks.of_moe // ranks.moe_ep, ranks.moe_ep, experts=experts, dtype=dtype)


def planned_tensors(config: KimiK2Config, ranks: Ranks, experts: str, dtype: torch.dtype) -> list[PlannedTensor]:
    """This model's tensors and their cuts: those of the NxDI class, but for its rank numbers.

    With replicas that share experts, everything else is cut among one replica's ranks.

    Raises:
        ConfigError: a size does not divide among the ranks.
    """
    layout = layout_of(ranks, experts, dtype)
    plan = without_nxdis(make_plan(config, layout))
    if ranks.dp is None:
        return list(plan.tensors)
    if expert_formats()[experts].tiles:
        raise ConfigError("tiles are cut for one replica; data-parallel replicas need another", field="quantization")
    replica = without_nxdis(make_plan(config, dataclasses.replace(layout, moe_tp=int(ranks.tp.world_size), moe_ep=1)))
    return [
        of_all if ".mlp.experts." in of_all.name else of_one
        for of_all, of_one in zip(plan.tensors, replica.tensors, strict=True)
    ]
