"""Where vLLM has changed, or is not there, its plugin's entry point says what is gone and leaves vLLM alone."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest

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
