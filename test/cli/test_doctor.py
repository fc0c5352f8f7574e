"""`doctor`: what it finds is what importlib.metadata and the machine say."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from command import kimi

from kimi_k2.kernels.common import build
from kimi_k2.neuron import sdk


@pytest.fixture(autouse=True)
def _nvcc_is_looked_for_anew() -> Iterator[None]:
    """It is looked for once a process, and other tests may have found it."""
    build.find_nvcc.cache_clear()
    yield
    build.find_nvcc.cache_clear()


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


H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
A100 = SimpleNamespace(name="NVIDIA A100", major=8, minor=0)
NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.48'\n"


@pytest.mark.parametrize(
    ("gpus", "nvcc", "shown", "needs"),
    [
        ((), NVCC, "none; torch is built for CUDA 13.0", "Hopper GPU, g++"),
        ((H200,), None, "1 x NVIDIA H200; torch is built for CUDA 13.0", "nvcc"),
        ((A100, H200, H200), NVCC, "1 x NVIDIA A100, 2 x NVIDIA H200; torch", "g++"),
        ((A100,), NVCC, "1 x NVIDIA A100; torch is built for CUDA 13.0 (our kernels are Hopper's", "Hopper GPU, g++"),
        ((H200,), "\x7fELF of another processor", "1 x NVIDIA H200", "nvcc, g++"),
        (None, NVCC, "none; CUDA error: all devices are busy", "Hopper GPU, g++"),
    ],
)
@pytest.mark.parametrize("bare", [False, True], ids=["installed", "a copy of src"])
def test_machines_with_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gpus: tuple[SimpleNamespace, ...] | None,
    nvcc: str | None,
    shown: str,
    needs: str,
    bare: bool,
) -> None:
    """Also one that has neither our distribution, nor Triton, nor the folder to which src/ links."""

    def properties(index: int) -> SimpleNamespace:
        if gpus is None:
            raise RuntimeError("CUDA error: all devices are busy\nmore of it")
        return gpus[index]

    compiler = tmp_path / "nvcc"
    compiler.write_text(nvcc or "")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(build, "find_nvcc", lambda: nvcc and str(compiler))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 if gpus is None else len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    versions = {"triton": None if bare else "3.6.0", "torch": "2.13.0"} | ({} if bare else {"kimi-k2": "0.1.0"})
    monkeypatch.setattr(sdk, "version_of", versions.get)
    if bare:
        monkeypatch.setattr(sdk, "CONSTRAINTS", tmp_path)
    lines = kimi("doctor").stdout.splitlines()
    assert re.search(rf"^Hopper GPU +\w+ +{re.escape(shown)}", "\n".join(lines), re.MULTILINE)
    found = next(line for line in lines if line.startswith("fast decode on a GPU"))
    assert found.split("needs ")[1].replace("triton, ", "") == needs
    assert ("triton" in found) == bare
    assert any("needs torch-xla, " in line for line in lines) != bare == ("needs constraints/, " in "".join(lines))
