"""Makes NxD and NxDI importable for these tests, with stand-ins where the Neuron SDK's binary modules are missing."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kimi_k2.neuron import standins
from kimi_k2.neuron.contrib import load as contrib
from kimi_k2.neuron.contrib import missing as absent_packages

__all__ = ["adapter_runs", "contrib", "leave_out_the_kernel", "missing", "prepare", "serve"]


def missing() -> str | None:
    """Why these tests cannot run here, or None."""
    absent = absent_packages()
    return f"not importable here: {', '.join(absent)}" if absent else None


def prepare(cpu: bool = True) -> list[str]:
    """Install the stand-ins (before anything of NxD is imported); returns the names they stand for."""
    if cpu:
        os.environ["NXD_CPU_MODE"] = "1"
        os.environ["PJRT_DEVICE"] = "CPU"
    sys.path.append(str(Path(__file__).parents[1] / "helpers"))  # of processes that pytest does not start
    return standins.install()


def leave_out_the_kernel() -> None:
    """The kernel of whole layers runs nowhere: operations on its weights stand for it."""
    contrib("decode_layers").DecodeLayersKernel.runs_on = lambda *_: False


def adapter_runs() -> bool:
    """Whether NxDI's HuggingFaceGenerationAdapter can: 0.8 (SDK 2.28) reads a name that it never sets."""
    from neuronx_distributed_inference._version import __version__

    return str(__version__) != "0.8.0"


def serve(answer: Callable[[dict[str, Any]], Any]) -> None:
    """Answer the job (a JSON file) of a worker's command line; rank 0 writes the answer to the job's `output`."""
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    found = answer(job)
    ranks = torch.distributed.is_initialized()
    if not ranks or torch.distributed.get_rank() == 0:
        torch.save(found, job["output"])
    if ranks:
        torch.distributed.barrier()
