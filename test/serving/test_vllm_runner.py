"""Which of vLLM's two runners serves our decode steps, where a version has a second one."""

from __future__ import annotations

import logging
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import model
from test_plugin_guard import deployment, fake_vllm, hopper  # noqa: F401  (hopper is a fixture)

from kimi_k2.serving.vllm import plugin, support


class OfSecond(SimpleNamespace):
    """The configuration of a version whose default is the second runner, as vLLM 0.33 has it."""

    lacking: tuple[str, ...] = ()
    second_alone = False

    @property
    def use_v2_model_runner(self) -> bool:
        first = os.environ.get(plugin.RUNNER) == "0"
        if first and self.second_alone:
            raise ValueError("HiSparse requires Model Runner V2")
        return not first

    def _get_v1_model_runner_unsupported_features(self) -> tuple[str, ...]:
        return self.lacking


def of_second(sizes: dict[str, int], **changed: Any) -> OfSecond:
    fields = {"hf_text_config": model(**sizes), "enforce_eager": False, **changed}
    made: OfSecond = deployment(OfSecond, **fields)
    return made


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("invariant", ["0", "1"])
def test_first_runner_where_the_second_would_be(
    invariant: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_vllm(monkeypatch, without="")
    monkeypatch.setenv(support.BATCH_INVARIANT, invariant)
    table = sys.modules["vllm.model_executor.models.config"]
    plugin.register()
    one = of_second({}, worker_cls="auto")
    with caplog.at_level(logging.INFO):
        table.MODELS_CONFIG_MAP["DeepseekV3ForCausalLM"].verify_and_update_config(one)
    assert not one.use_v2_model_runner
    assert one.worker_cls == plugin.WORKER
    assert one.enable_prefix_caching == (invariant == "0")
    assert caplog.text.count("VLLM_USE_V2_MODEL_RUNNER=1 keeps the second") == 1


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changed", "sizes", "environment"),
    [
        ({}, {}, {plugin.RUNNER: "1"}),
        ({}, {}, {support.ON_GPU: "0"}),
        ({}, {}, {support.DECODE_GRAPHS: "0"}),
        ({}, {"kv_lora_rank": 256}, {}),
        ({"pipeline_parallel_size": 2}, {}, {}),
        ({"device_type": "cpu"}, {}, {}),
        ({"enforce_eager": True}, {}, {}),
        ({"kv_transfer_config": object()}, {}, {}),
        ({"lacking": ("dspark speculative decoding",)}, {}, {}),
        ({"second_alone": True}, {}, {}),
    ],
)
def test_runner_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], sizes: dict[str, int], environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    plugin.choose_runner(of_second(sizes, **changed))
    assert os.environ.get(plugin.RUNNER) == environment.get(plugin.RUNNER)


@pytest.mark.usefixtures("hopper")
def test_versions_without_a_second_runner() -> None:
    plugin.choose_runner(deployment())
    assert plugin.RUNNER not in os.environ
