"""`doctor`: what it finds is what importlib.metadata and the machine say."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from kimi_k2.cli import app
from kimi_k2.kernels.common.build import find_nvcc


@pytest.fixture(autouse=True)
def _nvcc_is_looked_for_anew() -> Iterator[None]:
    """It is looked for once a process, and other tests may have found it."""
    find_nvcc.cache_clear()
    yield
    find_nvcc.cache_clear()


def test_json_names_versions_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CUDA_HOME", "/nonexistent")
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    found = {one["name"]: one for one in report["findings"]}
    assert found["torch"]["found"] == importlib.metadata.version("torch")
    assert found["nvcc"]["status"] == found["neuronx-cc"]["status"] == "missing"
    assert re.search(r"[\d.]+ [GT]B", found["disk"]["found"])
    parts = {one["name"]: one["missing"] for one in report["parts"]}
    assert parts["generate, chat, convert, plan (CPU)"] == []
    assert "nvcc" in parts["fast decode on a GPU"]
    assert "neuronx-cc" in parts["compile for Trainium"]


def test_a_version_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.13.1" if name == "torch" else real(name))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    line = next(line for line in result.stdout.splitlines() if line.startswith("torch "))
    assert "missing" in line
    assert "1.13.1 (works with >=2" in line


def test_a_version_older_than_an_extra_asks_for_keeps_nothing_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' interpreter wants a newer Triton than torch 2.11 brings to a GPU, where all kernels run with it."""
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "3.6.0" if name == "triton" else real(name))
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    found = next(one for one in report["findings"] if one["name"] == "triton")
    assert found["status"] == "note" and found["expected"].startswith("works with >=")
    assert "triton" not in next(one["missing"] for one in report["parts"] if one["name"] == "fast decode on a GPU")


def test_a_package_that_is_not_installed_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its source folder alone there is no metadata that says what is required."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "kimi-k2":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    first = json.loads(result.stdout)["findings"][0]
    assert (first["name"], first["status"]) == ("kimi-k2", "note")
