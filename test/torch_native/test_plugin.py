"""Which line of vllm-neuron gets which registration."""

from __future__ import annotations

from types import SimpleNamespace

import line
import pytest

from kimi_k2.neuron import vllm
from kimi_k2.neuron.torch_native import plugin


def test_the_torch_native_line_gets_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeuronPlatform:
        supported_quantization: list[str] = ["compressed-tensors"]  # noqa: RUF012
        _cpu_dequant_quantizations = frozenset({"mxfp8"})

    registered: dict[str, str] = {}
    registry = SimpleNamespace(register_model=registered.__setitem__)
    line.put(
        monkeypatch,
        line.modules({
            "vllm.model_executor.models.registry": {"ModelRegistry": registry},
            "vllm_neuron.vllm.platform": {"NeuronPlatform": NeuronPlatform},
        }),
    )  # fmt: skip
    vllm.register()
    vllm.register()  # at times vLLM calls twice
    assert registered == dict.fromkeys(plugin.ARCHITECTURES, plugin.TARGET)
    assert NeuronPlatform.supported_quantization == ["compressed-tensors", "fp8"]
    assert NeuronPlatform._cpu_dequant_quantizations >= {"mxfp8", "per_channel", "blockwise"}
    assert vllm.cpu_platform() is None  # NxDI's line has another platform


def test_nothing_is_registered_without_vllm_neuron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "register", lambda: pytest.fail("registered"))
    vllm.register()
