"""Where vLLM has changed, or is not there, its plugin's entry point says what is gone and leaves vLLM alone."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.serving.vllm import plugin, support


def fake_vllm(monkeypatch: pytest.MonkeyPatch, without: str) -> list[str]:
    """Modules with the names that we need but one; and what gets registered in them."""
    registered: list[str] = []

    class Registry:
        models: dict[str, object] = {}  # noqa: RUF012

        @classmethod
        def register_model(cls, architecture: str, target: str) -> None:
            registered.append(architecture)

    for module, name in support.NEEDED:
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if not isinstance(sys.modules.get(path), ModuleType) or not hasattr(sys.modules[path], "fake"):
                made = ModuleType(path)
                made.fake = True  # type: ignore[attr-defined]
                made.__path__ = []
                monkeypatch.setitem(sys.modules, path, made)
        if name != without:
            setattr(sys.modules[module], name, Registry if name == "ModelRegistry" else object())
    monkeypatch.setattr(support, "AS_TEXT", ())
    return registered


def test_names_of_what_is_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    registered = fake_vllm(monkeypatch, without="MLAAttentionSpec")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert registered == []
    assert "all operations are vLLM's, since it has changed" in caplog.text
    assert caplog.text.count("vllm.v1.kv_cache_interface.MLAAttentionSpec") == 1


def test_all_there(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    registered = fake_vllm(monkeypatch, without="")
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert registered == list(plugin.ARCHITECTURES)
    assert caplog.text == ""


def test_parsers_managers_gone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    fake_vllm(monkeypatch, without="")
    with caplog.at_level(logging.WARNING):
        plugin.register_parsers()
    assert caplog.text.count("no parser kimi_k2_stream") == 2


def deployment(**changed: Any) -> SimpleNamespace:
    """What `refusal` reads of vLLM's configuration: one GPU, as the command line's defaults leave it."""
    fields = {
        "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1,
        "enable_expert_parallel": False, "cache_dtype": "auto", "block_size": 16, "user_specified_block_size": False,
        "dtype": torch.bfloat16, "device_type": "cuda", "lora_config": None, "speculative_config": None, **changed,
    }  # fmt: skip
    one = SimpleNamespace(**fields)
    for part in ("parallel_config", "cache_config", "model_config", "device_config"):
        setattr(one, part, one)
    return one


def model(**changed: Any) -> SimpleNamespace:
    """Hugging Face's configuration of K2."""
    raw = {**KimiK2Config.load("kimi-k2-instruct-0905").to_hf_dict(), **changed}
    return SimpleNamespace(to_dict=lambda: raw)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the GPU and the compiler that the kernels need."""
    monkeypatch.delenv(support.ON_GPU, raising=False)
    monkeypatch.setattr(support, "_is_hopper", lambda: True)
    monkeypatch.setattr(support, "find_nvcc", lambda: "nvcc")


@pytest.mark.usefixtures("hopper")
def test_one_gpu_is_ours() -> None:
    assert support.refusal(deployment(), model()) is None
    assert support.refusal(deployment(block_size=64, user_specified_block_size=True), model()) is None
    assert support.refusal(deployment(device_type="cpu", dtype=torch.float32), model(kv_lora_rank=64)) is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changed", "sizes", "reason"),
    [
        ({"dtype": torch.float16}, {}, "torch.float16, the kernels take torch.bfloat16"),
        ({"block_size": 128, "user_specified_block_size": True}, {}, "pages of 128 tokens, the kernels take 64"),
        ({"tensor_parallel_size": 8}, {}, "several GPUs, which are not measured yet; KIMI_K2_VLLM_GPU=1 takes them"),
        ({}, {"kv_lora_rank": 256}, "attention of sizes (256, 64, 128, 128)"),
        ({}, {"num_attention_heads": 4, "num_key_value_heads": 4}, "4 heads a rank"),
        ({"cache_dtype": "fp8"}, {}, "a cache in fp8"),
        ({"pipeline_parallel_size": 2}, {}, "pipeline parallelism"),
    ],
)
def test_reasons_on_a_gpu(changed: dict[str, Any], sizes: dict[str, int], reason: str) -> None:
    assert support.refusal(deployment(**changed), model(**sizes)) == reason


@pytest.mark.usefixtures("hopper")
def test_asked_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(support.ON_GPU, "0")
    assert support.refusal(deployment(), model()) == "KIMI_K2_VLLM_GPU=0"
    monkeypatch.setenv(support.ON_GPU, "1")
    assert support.refusal(deployment(tensor_parallel_size=8), model()) is None
    assert support.refusal(deployment(tensor_parallel_size=16), model()) == "4 heads a rank"
    monkeypatch.setattr(support, "find_nvcc", lambda: None)
    assert support.refusal(deployment(), model()) == "no nvcc, which the kernels are built with"
    monkeypatch.setattr(support, "_is_hopper", lambda: False)
    assert support.refusal(deployment(), model()) == "a GPU that is no Hopper"
