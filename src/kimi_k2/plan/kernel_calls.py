"""What NKI kernels of ours read and write: custom calls in lowered graphs, run on the emulator with their shapes.

The contrib model lowers a kernel to a custom call where there is no `nki` (`kernels.py`): its name, and the arguments
that are no tensors as JSON in `backend_config`. HBM bytes are those of the kernel's own DMA on all of its cores.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from kimi_k2.nki.dtypes import NUMPY
from kimi_k2.nki.install import install
from kimi_k2.nki.kernels import MODULES
from kimi_k2.nki.launch import Kernel, argument
from kimi_k2.nki.storage import Region

PREFIX = "kimi_k2.nki."
_DTYPES = {
    "f32": "float32", "bf16": "bfloat16", "s32": "int32", "f8e4m3fn": "float8_e4m3", "f8e4m3": "float8_e4m3",
}  # fmt: skip
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_CONFIG = re.compile(r'backend_config=("(?:[^"\\]|\\.)*"|\{[^}]*\})')

Operand = tuple[str, tuple[int, ...]]  # HLO's element type, dimensions


@dataclass(frozen=True)
class CallCost:
    """HBM traffic of one call on a rank, in bytes.

    Attributes:
        read: of each operand, in order; of what two cores read both are counted.
        indexed: of `read`, what a run-time index chose.
        written: results, and operands that are written.
    """

    read: tuple[int, ...]
    indexed: tuple[int, ...]
    written: int


def kernel_name(attributes: str) -> str | None:
    """Which kernel of ours a custom call is, by its attributes in HLO text; None if it is none."""
    target = _TARGET.search(attributes)
    if target is None or not target[1].startswith(PREFIX):
        return None
    return target[1].removeprefix(PREFIX)


def call_cost(attributes: str, operands: tuple[Operand, ...]) -> CallCost | None:
    """Cost of a custom call by its attributes in HLO text; None if it is no kernel of ours.

    Raises:
        ValueError: the call names a kernel that is not known.
    """
    name = kernel_name(attributes)
    if name is None:
        return None
    if name not in MODULES:
        raise ValueError(f"custom_call_target: expected one of {', '.join(MODULES)}, got {name}")
    config = _CONFIG.search(attributes)
    if config is None:
        raise ValueError(f"backend_config: missing at a call of {name}")
    text = json.loads(config[1]) if config[1].startswith('"') else config[1]
    return _run(name, text, operands)


@cache
def _run(name: str, config: str, operands: tuple[Operand, ...]) -> CallCost:
    install()
    arguments: dict[str, Any] = json.loads(config)
    cores = arguments.pop("cores")
    made: Kernel = getattr(import_module(f"kimi_k2.nki.kernels.{MODULES[name]}"), name)
    kernel = made[cores]
    region = Region.shared_hbm if cores > 1 else Region.private_hbm
    arrays = [np.zeros(dims, NUMPY[_DTYPES[dtype]]) for dtype, dims in operands]
    if name == "selective_experts":
        _choose(arrays, arguments["num_experts"])
    tensors = [argument(array, region) for array in arrays]
    named = arguments.pop("named", [])
    others = dict(zip(named, tensors[len(tensors) - len(named) :], strict=True))
    kernel(*tensors[: len(tensors) - len(named)], **arguments, **others)
    assert kernel.last is not None
    place = {tensor.storage.number: number for number, tensor in enumerate(tensors)}
    read, indexed, written = [0] * len(tensors), [0] * len(tensors), 0
    for trace in kernel.last.traces:
        for instruction in trace:
            if instruction.engine != "dma":
                continue
            by_index = any(box.operand.endswith("(index)") for box in instruction.accesses)
            for box in instruction.accesses:
                size = hbm_bytes_of(box)
                if box.written:
                    written += size
                elif box.storage in place:
                    read[place[box.storage]] += size
                    indexed[place[box.storage]] += size * by_index
    return CallCost(tuple(read), tuple(indexed), written)


def hbm_bytes_of(box: Any) -> int:
    """Bytes of one operand of a DMA that lie in HBM; indices are none."""
    return 0 if box.region.on_chip or box.operand.endswith("(index)") else box.nbytes


def _choose(arrays: list[Any], num_experts: int) -> None:
    """Expert numbers of which a rank holds its average share."""
    local, index = arrays[1].shape[0], arrays[5]
    index[:] = np.arange(index.size).reshape(index.shape) % local
    others = index.shape[1] - round(index.shape[1] * local / num_experts)
    index[:, index.shape[1] - others :] = local
