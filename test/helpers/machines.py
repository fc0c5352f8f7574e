"""Where a test runs a kernel, by the same call: on a GPU, as CUDA on a CPU, or in Triton's interpreter.

- `gpu`: a Hopper.
- `cpu`: the CUDA C++ compiled for the host over a stand-in for CUDA's threads (kernels/cuda_on_cpu.h). Everything but
  the memory and tensor instructions is the code that runs on the GPU: indices, shared memory and its size, barriers,
  shuffles, masks, sums.
- `triton`: in a process where TRITON_INTERPRET is 1, as what it says is read when a kernel is defined. All is float32
  there, since the interpreter multiplies no bfloat16: arithmetic, indices and masks are compared, not the rounding.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from on_hopper import HOPPER
from torch import Tensor

from kimi_k2.kernels.common import launch, line, workspace
from kimi_k2.kernels.common.build import KERNELS, source_of
from kimi_k2.kernels.common.operation import Operation

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILER = shutil.which("g++")
NEEDS_COMPILER = pytest.mark.skipif(COMPILER is None, reason="needs g++")
MARKS = {
    "gpu": [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")],
    "cpu": [NEEDS_COMPILER],
    "triton": [pytest.mark.interpreted],
}
# What a relative error may be in float32.
FLOAT32 = 2e-6
_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def compiled(name: str, stand_in: str = "cuda_on_cpu.h", more: str = "") -> str:
    """The file of a kernel library for the host; `more` is C++ behind it."""
    out = Path(_FOLDER.name, f"{name.replace('/', '-')}-{len(more)}.so")
    header = Path(__file__).parents[1] / "kernels" / stand_in
    flags = "-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-DKIMI_K2_CUDA_ON_CPU", f"-I{KERNELS}", "-include", header
    command = [str(word) for word in (COMPILER, *flags, "-o", out, "-x", "c++", "-")]
    text = f'#include "{source_of(name)}"\n{more}'
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return str(out)


def library(name: str, more: str = "") -> ctypes.CDLL:
    """A kernel library for the host."""
    return ctypes.CDLL(compiled(name, more=more))


@dataclass(frozen=True)
class Machine:
    """What a row runs on."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def device(self) -> str:
        return "cuda" if self.name == "gpu" else "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """That stands for bfloat16."""
        return torch.float32 if self.name == "triton" else torch.bfloat16

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).to(self.dtype)

    def limit(self, rounded: float) -> float:
        """Of a relative error, where values are rounded."""
        return FLOAT32 if self.name == "triton" else rounded

    def recorded(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The call; on a GPU its replay from a graph."""
        if self.name != "gpu":
            return call
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call()

        def replayed() -> Any:
            graph.replay()
            return results

        return replayed


def rows(names: str, **by_machine: Iterable[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """A test of `machine` and these arguments, by the machines' names."""
    made = [
        pytest.param(Machine(name), *row, marks=MARKS[name])
        for name, some in by_machine.items()
        for row in some
        if (name == "triton") == INTERPRETED
    ]
    return pytest.mark.parametrize(["machine", *names.split()], made, ids=str, indirect=["machine"])


@contextmanager
def standing_in(machine: Machine, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the Python side of kernels run on this machine; without a GPU what is not written is NaN."""
    torch.manual_seed(0)
    if machine.name == "gpu":
        yield
        return
    patch.setattr(Operation, "__call__", Operation.function)
    if machine.name == "cpu":
        patch.setattr(launch, "load_library", library)
        patch.setattr(workspace, "_place", lambda _: (0, 0, 0))
        patch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=None))
        known = {"is_hopper": True, "runs_cuda": True, "hopper": ("NVIDIA H200", 132)}
        for name in [name for name in sys.modules if name.startswith("kimi_k2.kernels.")]:
            for function in known.keys() & vars(sys.modules[name]).keys():
                patch.setattr(sys.modules[name], function, lambda *_, value=known[function]: value)
    else:
        from kimi_k2.kernels.rowwise import decode_triton

        for names in (line.DTYPES, line._NAMES):
            patch.setitem(names, "bf16", torch.float32)
        for name in ("gdc_wait", "gdc_launch_dependents"):
            patch.setattr(decode_triton, name, lambda: None)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
