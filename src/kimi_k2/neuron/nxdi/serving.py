"""The model as a server builds it: from vLLM's Neuron plugin, whose defaults know nothing of the checkpoint.

The plugin (vllm-neuron 0.2, `worker/neuronx_distributed_model_loader.py`) makes a neuron config from vLLM's arguments,
always with `quantized=False`, then `load_pretrained_config(directory)`, `save_quantized_state_dict`, `compile`, `load`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from neuronx_distributed_inference.models.config import InferenceConfig

from kimi_k2.config import KimiK2Config
from kimi_k2.contrib_model.configuration_kimi_k2 import UNTOUCHED
from kimi_k2.errors import ConfigError
from kimi_k2.neuron.compile import environment, runtime_environment
from kimi_k2.plan.deployment import Deployment, NeuronOptions
from kimi_k2.sharding.experts import expert_formats, without_tiles
from kimi_k2.sharding.layout import Decode, Layout

from .config import KimiK2InferenceConfig, KimiK2NeuronConfig
from .modeling_kimi_k2 import NeuronKimiK2ForCausalLM

FROM_CHECKPOINT = "checkpoint"


class ServedNeuronConfig(KimiK2NeuronConfig):
    """KimiK2NeuronConfig with what a server cannot know.

    Args:
        preset: a deployment (configs/*.yaml); its settings hold wherever `options` have none.
        experts: form of the routed experts: bf16, blockwise or per_channel. `checkpoint`, the default without a
            preset, keeps FP8 blocks as blocks, makes INT4 groups FP8 with a scale a channel, and leaves BF16.
            Not read where `options` say `quantized=True` themselves.
        options: NxDI's, see MoENeuronConfig.

    Raises:
        ConfigError: `experts` is none of these, or the preset is for another number of ranks.
    """

    def __init__(self, *, preset: str | None = None, experts: str | None = None, **options: Any) -> None:
        if preset is not None:
            deployment = Deployment.load(preset)
            options = _with_preset(deployment, options)
            experts = experts or deployment.experts
            os.environ.update(environment(deployment))
        else:
            lnc = options.get("logical_nc_config", NeuronOptions().logical_nc_config)
            os.environ.update(runtime_environment(lnc, options.get("tp_degree", 64)))
        experts = experts or FROM_CHECKPOINT
        if experts not in (FROM_CHECKPOINT, *expert_formats()):
            raise ConfigError(
                f"expected {', '.join(expert_formats())} or {FROM_CHECKPOINT}, got {experts!r}", field="experts"
            )
        if options.get("lora_config") is not None and experts != FROM_CHECKPOINT:
            experts = without_tiles(experts)
        super().__init__(**options)
        self.preset, self.experts = preset, experts  # after the check of NxDI's own options, of which these are none


def _with_preset(preset: Deployment, options: Mapping[str, Any]) -> dict[str, Any]:
    ranks = options.get("tp_degree", preset.tp_degree)
    if ranks != preset.tp_degree:
        raise ConfigError(
            f"{preset.name} is for {preset.tp_degree} ranks (vLLM's --tensor-parallel-size), got {ranks}",
            field="tp_degree",
        )
    resized = preset.with_lengths(*(options.get(name) for name in ("seq_len", "batch_size", "max_context_length")))
    return {"compiler_args": preset.compiler_args, **resized.neuron_arguments(), **options}


def checkpoint_experts(config: KimiK2Config, decode: Decode = "xla") -> str:
    """The form that keeps what a checkpoint stores: its FP8 blocks exactly, INT4 as FP8, else BF16."""
    if config.quantization is None:
        return "bf16" if decode == "xla" else "bf16_tiles"
    if decode != "xla":
        return "tiles"
    return "blockwise" if config.format_of_experts().e4m3_block else "per_channel"


def hold_experts(config: KimiK2InferenceConfig) -> None:
    """Write NxDI's quantization settings for the routed experts into `config.neuron_config`."""
    neuron: Any = config.neuron_config
    if neuron.quantized:  # chosen by hand; checked by KimiK2NeuronConfig
        return
    if neuron.experts == FROM_CHECKPOINT:
        neuron.experts = checkpoint_experts(config.hf, neuron.decode)
    layout = Layout(neuron.moe_tp_degree, neuron.moe_ep_degree, experts=neuron.experts, decode=neuron.decode)
    if options := layout.expert_format(config.hf).neuron_options():
        more = {
            "quantization_dtype": "f8e4m3",
            "modules_to_not_convert": list(UNTOUCHED),
            "quantized_checkpoints_path": "",
        }
        for name, value in {**options, **more}.items():
            setattr(neuron, name, value)
        config.derive_blocks()


class ServedInferenceConfig(KimiK2InferenceConfig):
    """KimiK2InferenceConfig that takes the experts' form from the checkpoint that `load_config` read.

    Read back from a compiled model's neuron_config.json (no `load_config`) it is what was compiled.
    """

    def __init__(
        self,
        neuron_config: ServedNeuronConfig,
        fused_spec_config: Any = None,
        load_config: Callable[[InferenceConfig], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(neuron_config, fused_spec_config, load_config, **kwargs)
        if load_config is not None:
            hold_experts(self)

    @classmethod
    def get_neuron_config_cls(cls) -> type[ServedNeuronConfig]:
        """The neuron config class that the plugin and NxDI build."""
        return ServedNeuronConfig


class ServedKimiK2ForCausalLM(NeuronKimiK2ForCausalLM):
    """NeuronKimiK2ForCausalLM with ServedInferenceConfig; what `registration` puts into NxDI's table."""

    @classmethod
    def get_config_cls(cls) -> type[ServedInferenceConfig]:
        """ServedInferenceConfig."""
        return ServedInferenceConfig
