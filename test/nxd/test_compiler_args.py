"""What NxDI hands to the compiler and the runtime for each submodel of a preset, from our commands and from vLLM."""

from __future__ import annotations

import os
import re

import environment
import pytest

from kimi_k2.config import KimiK2Config
from kimi_k2.neuron import compile as settings
from kimi_k2.plan.deployment import CONTEXT_ENCODING, STAGES, VISION_ENCODER, Deployment


@pytest.mark.parametrize("name", ["trn2-tp64-ep1", "trn2-tp32-ep2", "trn2-tp64-ep1-images"])
def test_each_stage_has_its_own_and_nothing_twice(name: str) -> None:
    environment.prepare()
    from kimi_k2.neuron.compile import build_application, without_nki

    preset = Deployment.load(name)
    model = "kimi-k2-instruct-0905" if preset.vision is None else "kimi-k2.5"
    config = KimiK2Config.from_preset(model, num_hidden_layers=2)
    app = build_application(preset, config, model, **without_nki(preset))
    arguments = {wrapper.tag: wrapper.compiler_args for wrapper in (*app.models, *getattr(app, "vision_models", ()))}
    tower = arguments.pop(VISION_ENCODER, None)
    assert (tower is not None) == (preset.vision is not None)
    if tower is not None:
        assert tower.split()[:4] == ["--model-type=transformer", "-O1", "--auto-cast=none", "--lnc=2"]
    assert set(arguments) == set(STAGES)
    config_of_text = getattr(app, "text_config", app.config).neuron_config
    assert config_of_text.weights_to_skip_layout_optimization == [".*"]
    for stage, line in arguments.items():
        assert line.startswith(" ".join(settings.compiler_args(preset, stage)))
        options = re.findall(r"(?:^|\s)(-O\d|--[\w-]+)", re.sub(r"'[^']*'", "", line))
        assert len(options) == len(set(options)), line
        assert line.count("--experimental-unsafe-fp8e4m3fn-as-fp8e4m3") == 1
        # NxDI's own default for prefill, and for that alone; in the one option that takes it.
        assert line.count("--modular-flow-mac-threshold=10") == (stage == CONTEXT_ENCODING)
        assert line.count("--internal-hlo2tensorizer-options=") == line.count("--verify-hlo=true") == 1


def test_a_preset_that_names_the_threshold_has_its_own() -> None:
    added = environment.contrib("cpu_mode").with_modular_flow
    assert added("-O1 " + (own := "--internal-hlo2tensorizer-options='--modular-flow-mac-threshold=1'")) == f"-O1 {own}"
    plain = "--internal-hlo2tensorizer-options='--modular-flow-mac-threshold=10 --verify-hlo=true'"
    assert added("-O1") == f"-O1 {plain}"


@pytest.mark.parametrize("name", ["trn2-tp32-ep2", None])
def test_vllm_serves_with_the_same(monkeypatch: pytest.MonkeyPatch, name: str | None) -> None:
    preset = Deployment.load(name or "trn2-tp32-ep2").model_copy(update={"environment": {"OURS": "1"}})
    expected = settings.environment(preset) if name else settings.runtime_environment(2, 64)
    for variable in settings.environment(preset):
        monkeypatch.setenv(variable, "other")
    serving = environment.contrib("serving")
    monkeypatch.setattr(serving.Deployment, "load", lambda _: preset)
    served = serving.ServedNeuronConfig(preset=name, tp_degree=64, batch_size=1, seq_len=4096)
    assert {variable: os.environ[variable] for variable in expected} == expected
    if name:
        assert served.compiler_args == {stage: settings.compiler_args(preset, stage) for stage in STAGES}
