"""What NxDI hands to the compiler and the runtime for each submodel: the same line whoever builds the class."""

from __future__ import annotations

import os
import re
from typing import Any

import environment
import pytest
import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.neuron import compile as settings
from kimi_k2.plan.cost import LONG_PROMPT, RAISED
from kimi_k2.plan.deployment import CONTEXT_ENCODING, STAGES, TOKEN_GENERATION, VISION_ENCODER, Deployment


def lines(app: Any) -> dict[str, str]:
    """Arguments by submodel."""
    return {wrapper.tag: wrapper.compiler_args for wrapper in (*app.models, *getattr(app, "vision_models", ()))}


@pytest.mark.parametrize("name", ["trn2-tp64-ep1", "trn2-tp32-ep2", "trn2-tp64-ep1-128k", "trn2-tp64-ep1-images"])
def test_each_stage_has_its_own_and_nothing_twice(name: str) -> None:
    environment.prepare()
    preset = Deployment.load(name)
    model = "kimi-k2-instruct-0905" if preset.vision is None else "kimi-k2.5"
    config = KimiK2Config.from_preset(model, num_hidden_layers=2)
    app = settings.build_application(preset, config, model, disable_argmax_kernel=True)
    arguments = lines(app)
    tower = arguments.pop(VISION_ENCODER, None)
    assert (tower is not None) == (preset.vision is not None)
    if tower is not None:
        assert tower.split()[:4] == ["--model-type=transformer", "-O1", "--auto-cast=none", "--lnc=2"]
    assert set(arguments) == set(STAGES)
    config_of_text = getattr(app, "text_config", app.config).neuron_config
    assert config_of_text.weights_to_skip_layout_optimization == [".*"]
    for stage, line in arguments.items():
        prefill = stage == CONTEXT_ENCODING
        options = re.findall(r"(?:^|\s)(-O\d|--[\w-]+)", re.sub(r"'[^']*'", "", line))
        assert len(options) == len(set(options)), line
        assert f"-O{1 if prefill else 3 if preset.moe_ep_degree > 1 else 2}" in options
        assert "--auto-cast=none" in line and "saturate" not in line
        assert line.count("--experimental-unsafe-fp8e4m3fn-as-fp8e4m3") == 1
        assert line.count("--modular-flow-mac-threshold=10") == prefill
        assert line.count("--internal-hlo2tensorizer-options=") == line.count("--verify-hlo=true") == 1
        assert (RAISED in options or RAISED in line) == (prefill and preset.max_context_length > LONG_PROMPT)


def test_presets_vllm_and_the_contrib_model_give_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.prepare()
    from kimi_k2.contrib_model import configuration_kimi_k2 as contrib
    from kimi_k2.contrib_model.modeling_kimi_k2 import NeuronKimiK2ForCausalLM

    preset = Deployment.load("trn2-tp32-ep2").model_copy(
        update={"compiler_args": {TOKEN_GENERATION: ("--verbose=35",)}, "environment": {"OURS": "1"}}
    )
    raw = KimiK2Config.from_preset("kimi-k2-instruct-0905", num_hidden_layers=2)
    ours = lines(settings.build_application(preset, raw, "kimi-k2-instruct-0905"))
    assert ours[TOKEN_GENERATION].endswith(" --verbose=35")
    assert "--verbose" not in ours[CONTEXT_ENCODING]

    serving, config = environment.contrib("serving"), environment.contrib("config")
    for variable in settings.environment(preset):
        monkeypatch.setenv(variable, "other")
    monkeypatch.setattr(serving.Deployment, "load", lambda _: preset)
    served = serving.ServedNeuronConfig(
        preset="trn2-tp32-ep2", tp_degree=64, batch_size=1, seq_len=4096, torch_dtype=torch.bfloat16
    )
    assert {name: os.environ[name] for name in settings.environment(preset)} == settings.environment(preset)
    inference = serving.ServedInferenceConfig(served, load_config=config.load_kimi_config(raw))
    assert lines(serving.ServedKimiK2ForCausalLM("none", inference)) == ours

    given = {**preset.neuron_arguments(), "quantized": True, "torch_dtype": torch.bfloat16}
    given = {name: value for name, value in given.items() if name in contrib.FOLLOWED}
    neuron = contrib.KimiK2NeuronConfig(
        compiler_args={str(graph): line for graph, line in preset.compiler_args.items()}, **given
    )
    fields = raw.model_dump(exclude={"vision", "quantization", "tensor_prefix"})
    fields["quantization_config"] = raw.quantization.to_hf_dict() if raw.quantization else None
    bare = contrib.KimiK2InferenceConfig(neuron, load_config=lambda target: target.__dict__.update(fields))
    assert lines(NeuronKimiK2ForCausalLM("none", bare)) == ours
