"""What NxDI hands to the compiler for each submodel of a preset."""

from __future__ import annotations

import re

import environment
import pytest

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.deployment import CONTEXT_ENCODING, STAGES, TOKEN_GENERATION, Deployment


@pytest.mark.parametrize("name", ["trn2-tp64-ep1", "trn2-tp32-ep2"])
def test_each_stage_has_its_own_and_nothing_twice(name: str) -> None:
    environment.prepare()
    from kimi_k2.neuron.compile import build_application, without_nki

    preset = Deployment.load(name)
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905", num_hidden_layers=2)
    app = build_application(preset, config, "kimi-k2-instruct-0905", **without_nki(preset))
    arguments = {wrapper.tag: wrapper.compiler_args for wrapper in app.models}
    assert set(arguments) == set(STAGES)
    for line in arguments.values():
        options = re.findall(r"(?:^|\s)(-O\d|--[\w-]+)", re.sub(r"'[^']*'", "", line))
        assert len(options) == len(set(options)), line
        assert line.count("--experimental-unsafe-fp8e4m3fn-as-fp8e4m3") == 1
    assert "-O1" in arguments[CONTEXT_ENCODING] and "tiling-factor=2" in arguments[CONTEXT_ENCODING]
    decode = "-O3" if preset.moe_ep_degree > 1 else "-O2"
    assert decode in arguments[TOKEN_GENERATION] and "tiling-factor=1" in arguments[TOKEN_GENERATION]
