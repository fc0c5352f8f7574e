"""Makes NxD and NxDI importable for these tests, with stand-ins where the Neuron SDK's binary modules are missing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kimi_k2.neuron import standins
from kimi_k2.neuron.contrib import load as contrib
from kimi_k2.neuron.contrib import missing as absent_packages

sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # of processes that pytest does not start

__all__ = ["adapter_runs", "contrib", "executed", "leave_out_the_kernel", "missing", "prepare"]


def missing() -> str | None:
    """Why these tests cannot run here, or None."""
    absent = absent_packages()
    return f"not importable here: {', '.join(absent)}" if absent else None


def prepare(cpu: bool = True) -> list[str]:
    """Install the stand-ins (before anything of NxD is imported); returns the names they stand for."""
    os.environ["PJRT_DEVICE"] = "CPU"
    if cpu:
        os.environ["NXD_CPU_MODE"] = "1"
    return standins.install()


def executed() -> bool:
    """Whether graphs are lowered in this process, not run by NxD's CPU mode."""
    return "NXD_CPU_MODE" not in os.environ


def leave_out_the_kernel() -> None:
    """The kernel of whole layers runs nowhere: operations on its weights stand for it."""
    contrib("decode_layers").DecodeLayersKernel.runs_on = lambda *_: False


def adapter_runs() -> bool:
    """Whether NxDI's HuggingFaceGenerationAdapter can: 0.8 (SDK 2.28) reads a name that it never sets."""
    from neuronx_distributed_inference._version import __version__

    return str(__version__) != "0.8.0"
