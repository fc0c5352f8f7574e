"""What a measurement depends on: versions, device, commit. No host names, no paths, no user names."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "kimi-k2", "torch", "triton", "transformers", "torch-neuronx", "neuronx-cc", "libneuronxla", "neuronx-distributed",
    "neuronx-distributed-inference",
)  # fmt: skip
FLAGS = ("NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "KIMI_K2_KERNELS")


def capture(details: dict[str, Any]) -> dict[str, Any]:
    """The environment of a sweep.

    Args:
        details: the backend's own.
    """
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "versions": versions,
        "flags": {name: _without_paths(os.environ[name]) for name in FLAGS if name in os.environ},
        "commit": _commit(),
        **details,
    }


def _without_paths(flags: str) -> str:
    return " ".join(word if "/" not in word else f"{word.partition('=')[0]}=..." for word in flags.split())


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The source's git commit, `+` behind it if files of the package differ; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no", "--", str(here.parent)) else "")
    except (OSError, subprocess.SubprocessError):
        return None
