"""`doctor`: what it finds is what importlib.metadata and the machine say."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator

import pytest
from command import kimi

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
    result = kimi("doctor", "--json")
    report = json.loads(result.stdout)
    found = {row["name"]: row for row in report["findings"]}
    assert found["torch"]["found"] == importlib.metadata.version("torch")
    assert found["nvcc"]["status"] == found["neuronx-cc"]["status"] == "missing"
    assert re.search(r"[\d.]+ [GT]B", found["disk"]["found"])
    parts = {row["name"]: row["missing"] for row in report["parts"]}
    assert parts["generate, chat, convert, plan (CPU)"] == []
    assert "nvcc" in parts["fast decode on a GPU"]
    assert "neuronx-cc" in parts["compile for Trainium"]


@pytest.mark.parametrize(
    ("package", "version", "status", "says", "kept"),
    [
        ("torch", "1.13.1", "missing", "works with >=2", "generate, chat, convert, plan (CPU)"),
        # The tests' interpreter wants a newer Triton than torch 2.11 brings to a GPU, where all kernels run with it.
        ("triton", "3.6.0", "note", "works with >=", None),
        # From its source folder alone there is no metadata that says what is required.
        ("kimi-k2", None, "note", "", None),
    ],
)
def test_versions_that_an_extra_or_a_library_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, package: str, version: str | None, status: str, says: str, kept: str | None
) -> None:
    real = importlib.metadata.version

    def found(name: str) -> str:
        if name == package and version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return str(version) if name == package else real(name)

    monkeypatch.setattr(importlib.metadata, "version", found)
    report = json.loads(kimi("doctor", "--json").stdout)
    finding = next(finding for finding in report["findings"] if finding["name"] == package)
    assert finding["status"] == status and finding["expected"].startswith(says)
    assert {row["name"] for row in report["parts"] if package in row["missing"]} >= ({kept} if kept else set())
    assert kept or not any(package in row["missing"] for row in report["parts"])


def test_findings_are_printed() -> None:
    printed = kimi("doctor")
    assert any(line.startswith("torch ") for line in printed.stdout.splitlines())
