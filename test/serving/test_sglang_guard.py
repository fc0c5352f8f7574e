"""Where SGLang has changed, or is asked for what our model does not do, it runs as without us, and a line says why."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import fake_module, model

from kimi_k2.kernels.attention.mla_sizes import PAGE
from kimi_k2.serving.paged import support as common
from kimi_k2.serving.sglang import plugin, support


class FakeSglang:
    """Modules with the names that the plugin takes of SGLang's, and what it registers in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.backends: dict[str, Any] = {}
        self.choices: list[str] = ["fa3"]
        self.providers: dict[str, Any] = {}
        self.hooks: dict[str, Any] = {}
        self.capability, self.dtype = (9, 0), torch.bfloat16
        self._monkeypatch = monkeypatch
        arg_groups = "sglang.srt.arg_groups"
        self.module(
            f"{arg_groups}.choices",
            ATTENTION_BACKEND_CHOICES=self.choices, add_attention_backend_choices=self.choices.extend,
        )  # fmt: skip
        self.module(
            f"{arg_groups}.model_override_base",
            register_model_override=lambda name: lambda found: self.providers.setdefault(name, found),
            resolving_view=lambda settings: settings, model_config_of=lambda _: SimpleNamespace(dtype=self.dtype),
        )  # fmt: skip
        self.module(
            f"{arg_groups}.resolution_hooks",
            register_resolution_hook=lambda name: lambda found: self.hooks.setdefault(name, found),
        )
        self.module(
            f"{arg_groups}.overrides",
            declare_resolution=lambda settings, _, **fields: settings.__dict__.update(fields),
        )
        self.module(
            "sglang.srt.layers.attention.attention_registry",
            register_attention_backend=lambda name: lambda found: self.backends.setdefault(name, found),
        )
        self.module(
            "sglang.srt.model_executor.cuda_graph_config",
            Backend=SimpleNamespace(DISABLED="disabled"), Phase=SimpleNamespace(PREFILL="prefill"),
            with_phase=lambda graphs, phase, backend: {**graphs, phase: backend},
        )  # fmt: skip
        self.module(
            "sglang.srt.runtime_context",
            attention_backends=lambda: (support.BACKEND, support.BACKEND),
            get_platform=lambda: SimpleNamespace(device_capability=self.capability),
        )
        monkeypatch.setattr(support, "AS_TEXT", ())

    def module(self, name: str, **names: Any) -> None:
        made = fake_module(self._monkeypatch, name)
        for attribute, value in names.items():
            setattr(made, attribute, value)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> FakeSglang:
    monkeypatch.delenv(support.ON_GPU, raising=False)
    monkeypatch.setenv(support.PACKAGE_VARIABLE, "")
    monkeypatch.setattr(common, "find_nvcc", lambda: "nvcc")
    return FakeSglang(monkeypatch)


def settings(**changed: Any) -> SimpleNamespace:
    """SGLang's as its command line leaves them on a CPU."""
    fields: dict[str, Any] = {field: served[0] for _, field, served in support.SERVED}
    fields |= {"tp_size": 1, "ep_size": 1, "page_size": None, "device": "cpu", "cuda_graph_config": {"decode": "full"}}
    fields |= {"attention_backend": None, "prefill_attention_backend": None, "decode_attention_backend": None}
    return SimpleNamespace(**{**fields, **changed})


def prompts_in(backend: str) -> dict[str, Any]:
    """What SGLang's settings say where a user has set the backend of prompts' CUDA graphs."""
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend=backend))
    return {"_cuda_graph_config_locked": {("prefill", "backend")}, "cuda_graph_config": graphs}


def test_all_there(sglang: FakeSglang, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        plugin.register_model()
        plugin.register_model()  # SGLang may call it again
    assert caplog.text == ""
    assert sglang.choices == ["fa3", support.BACKEND]
    assert list(sglang.backends) == [support.BACKEND]
    names = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")
    assert sglang.providers == dict.fromkeys(names, support.overrides)
    assert sglang.hooks == {"handle_model_specific_adjustments": support.without_graphs_of_prompts}


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("sglang.srt.arg_groups.choices", "add_attention_backend_choices"),
        ("sglang.srt.runtime_context", "attention_backends"),
    ],
)
def test_names_of_what_is_gone(sglang: FakeSglang, caplog: pytest.LogCaptureFixture, module: str, name: str) -> None:
    delattr(sys.modules[module], name)
    with caplog.at_level(logging.WARNING):
        plugin.register_model()
    assert sglang.providers == sglang.backends == {}
    assert f"all operations are SGLang's, since it has changed; gone: {module}.{name}" in caplog.text


def test_sglang_is_not_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert "no parser kimi_k2_stream" in caplog.text
    assert all(f"{module}." in caplog.text for module, _ in support.NEEDED)
    assert all(f"{module}: " in caplog.text for module, _ in support.AS_TEXT)


def test_the_classes_are_where_sglang_looks() -> None:
    directory = Path(support.__file__).parent / "models"
    assert support.PACKAGE == "kimi_k2.serving.sglang.models"
    for module, name in zip(("kimi_k2", "kimi_k25"), support.ARCHITECTURES, strict=True):
        text = (directory / f"{module}.py").read_text(encoding="utf-8")
        assert f"class {name}(" in text
        assert f"\nEntryClass = {name}\n" in text


@pytest.mark.usefixtures("sglang")
def test_defaults_of_a_model_that_is_ours() -> None:
    assert support.overrides(settings(), model()) == {"attention_backend": support.BACKEND}
    assert os.environ[support.PACKAGE_VARIABLE] == support.PACKAGE
    assert support.overrides(settings(attention_backend=support.BACKEND), model()) != {}
    assert support.overrides(settings(tp_size=8, ep_size=4), model()) != {}
    assert support.overrides(settings(), SimpleNamespace(text_config=model())) != {}


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("changed", "sizes", "reason"),
    [
        ({"pp_size": 2}, {}, "pipeline parallelism (pp_size)"),
        ({"attn_dp_size": 2}, {}, "data parallelism of attention (attn_dp_size)"),
        ({"speculative_algorithm": "EAGLE"}, {}, "speculative decoding (speculative_algorithm)"),
        ({"kv_cache_dtype": "fp8_e4m3"}, {}, "another cache type than the model's (kv_cache_dtype)"),
        ({"quantization": "fp8"}, {}, "another form of the weights (quantization)"),
        ({"page_size": 64}, {}, "pages of 64 tokens on a CPU"),
        ({"attention_backend": "fa3"}, {}, "another attention was asked for"),
        (prompts_in("breakable"), {}, "CUDA graphs of prompts were asked for (breakable)"),
        (prompts_in("full"), {}, "CUDA graphs of prompts were asked for (full)"),
        ({"decode_attention_backend": "flashmla"}, {}, "another attention was asked for"),
        ({"tp_size": 3}, {}, "3"),
        ({}, {"topk_method": "greedy"}, "topk_method"),
        ({"device": "cuda"}, {}, "a GPU, where several ranks have not been tried"),
    ],
)
def test_what_is_left_to_sglang(
    changed: dict[str, Any], sizes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert support.overrides(settings(**changed), model(**sizes)) == {}
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("kimi-k2: all operations are SGLang's: ")
    assert reason in line
    assert os.environ[support.PACKAGE_VARIABLE] == ""


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_graphs_of_prompts_that_are_switched_off(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `disable_cuda_graph`, `disable_prefill_cuda_graph` or a backend, which all set that of prompts."""
    monkeypatch.setenv(support.ON_GPU, "1")
    given = settings(device=device, **prompts_in("disabled"))
    assert support.overrides(given, model())["attention_backend"] == support.BACKEND
    assert os.environ[support.PACKAGE_VARIABLE] == support.PACKAGE


@pytest.mark.usefixtures("sglang")
def test_another_package_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(support.PACKAGE_VARIABLE, "theirs")
    assert support.refusal(settings(), model()) == "SGLANG_EXTERNAL_MODEL_PACKAGE names theirs"


def test_gpus(sglang: FakeSglang, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of the kernels' size."""
    monkeypatch.setenv(support.ON_GPU, "1")
    gpu = {"device": "cuda", "tp_size": 8}
    wanted = {"attention_backend": support.BACKEND, "page_size": PAGE}
    assert support.overrides(settings(**gpu), model()) == wanted
    assert support.overrides(settings(**gpu, page_size=PAGE), model()) == wanted
    assert support.refusal(settings(**gpu, page_size=1), model()) == f"pages of 1 tokens, the kernels take {PAGE}"
    sglang.dtype = torch.float16
    assert support.refusal(settings(**gpu), model()) == "torch.float16, the kernels take torch.bfloat16"
    sglang.capability = (10, 0)
    assert support.refusal(settings(**gpu), model()) == "a GPU that is no Hopper"
    assert support.refusal(settings(**{**gpu, "device": "xpu"}), model()) == "a GPU that is no Hopper"


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize("backend", [support.BACKEND, "fa3"])
def test_prompts_are_in_no_cuda_graph_of_sglangs(backend: str) -> None:
    """Unless its own attention serves."""
    graphs = {"decode": "full", "prefill": "breakable"}
    one = settings(device="cuda", cuda_graph_config=graphs)
    support.without_graphs_of_prompts(one, lambda given: setattr(given, "attention_backend", backend))
    assert one.cuda_graph_config == (graphs if backend == "fa3" else {"decode": "full", "prefill": "disabled"})
