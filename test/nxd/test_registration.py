"""What vLLM's Neuron plugin asks of NxDI for a checkpoint directory: class, configuration, quantization defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import environment
import pytest

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError

PLAIN = {"fp8": "blockwise", "bf16": "bf16", "thinking": "per_channel", "k2.5": "per_channel"}


def vllm_key(architecture: str) -> tuple[str, str]:
    """The plugin's rule: `XForYZ` is looked up as MODEL_TYPES["x"]["y-z"], conditional generation as causal LM."""
    model, task = architecture.split("For", 1)
    task = "CausalLM" if task == "ConditionalGeneration" else task
    return model.lower(), re.sub("([a-z])([A-Z])", r"\1-\2", task).lower()


@pytest.fixture
def registered() -> Iterator[dict[str, Any]]:
    """NxDI's table after registration; without our entries again afterwards."""
    from neuronx_distributed_inference.utils.constants import MODEL_TYPES

    registration = environment.contrib("registration")
    # None is upstream's: otherwise registering would replace a model.
    assert not set(registration.NAMES) & set(MODEL_TYPES)
    registration.register()
    yield MODEL_TYPES
    for name in registration.NAMES:
        MODEL_TYPES.pop(name, None)


def served_config(directory: Path, model_class: Any, **options: Any) -> Any:
    """Configuration as the plugin's `_load_weights_common` builds it, with the arguments that it always gives."""
    from neuronx_distributed_inference.models.config import OnDeviceSamplingConfig
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    always: dict[str, Any] = {
        "tp_degree": 1,
        "batch_size": 4,
        "ctx_batch_size": 1,
        "seq_len": 64,
        "max_context_length": 64,
        "enable_bucketing": True,
    }
    always |= {"lora_config": None, "pa_num_blocks": 8, "pa_block_size": 32}  # of vllm-neuron 0.2, blocks or none
    always |= dict.fromkeys(("is_block_kv_layout", "is_prefix_caching"), False)
    always |= {"is_continuous_batching": True, "quantized": False, "torch_dtype": "bfloat16", "padding_side": "right"}
    sampling = OnDeviceSamplingConfig(dynamic=True, deterministic=False)
    neuron = model_class.get_neuron_config_cls()(**{**always, "on_device_sampling_config": sampling, **options})
    return model_class.get_config_cls()(neuron, load_config=load_pretrained_config(str(directory)))


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration"])
def test_the_registry_resolves_kimi_k2(registered: dict[str, Any], architecture: str) -> None:
    model, task = vllm_key(architecture)
    chosen = registered[model][task]
    assert issubclass(chosen, environment.contrib("modeling_kimi_k2").NeuronKimiK2ForCausalLM)
    assert issubclass(chosen.get_config_cls(), environment.contrib("config").KimiK2InferenceConfig)


@pytest.mark.parametrize("name", PLAIN)
def test_configuration_and_experts_come_from_the_checkpoint(
    registered: dict[str, Any], checkpoints: dict[str, Path], tmp_path: Path, name: str
) -> None:
    model_class = registered["deepseekv3"]["causal-lm"]
    config = served_config(checkpoints[name], model_class)
    plain = KimiK2Config.from_pretrained(checkpoints[name])
    assert config.hf == plain.model_copy(update={"tensor_prefix": "", "model_type": "kimi_k2"})
    neuron = config.neuron_config
    assert neuron.experts == PLAIN[name]
    assert config.layout.experts == PLAIN[name]
    # The plugin's next step; upstream's raises NotImplementedError in load_hf_model.
    model_class.save_quantized_state_dict(str(checkpoints[name]), config)
    # What is saved beside the compiled model is read back as it was, whatever the checkpoint says then.
    config.save(str(tmp_path))
    again = model_class.get_config_cls().load(str(tmp_path))
    assert json.loads(again.to_json_string()) == json.loads(config.to_json_string())


def test_deepseek_v3_as_model_type(registered: dict[str, Any], bf16: Path, tmp_path: Path) -> None:
    """transformers' own class reads such a file and has no `moe_layer_freq` unless the file does."""
    raw = json.loads((bf16 / "config.json").read_text())
    raw.update(model_type="deepseek_v3")
    del raw["moe_layer_freq"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = served_config(tmp_path, registered["deepseekv3"]["causal-lm"])
    assert config.hf.moe_layer_freq == 1
    assert config.hf.rope_scaling == KimiK2Config.from_pretrained(bf16).rope_scaling


def test_experts_and_presets_by_choice(registered: dict[str, Any], fp8: Path) -> None:
    model_class = registered["deepseekv3"]["causal-lm"]
    directory = fp8
    by_name = served_config(directory, model_class, experts="per_channel").neuron_config
    assert by_name.quantization_type == "expert_wise_per_channel_symmetric"
    assert not served_config(directory, model_class, experts="bf16").neuron_config.quantized
    with pytest.raises(ConfigError, match="experts"):
        served_config(directory, model_class, experts="int3")
    with pytest.raises(ConfigError, match="tensor-parallel-size"):
        served_config(directory, model_class, preset="trn2-tp64-ep1", tp_degree=32)
