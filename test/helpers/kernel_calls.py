"""What NKI kernels of ours read and write: custom calls in lowered graphs, run on the emulator with their shapes.

The NxDI model lowers a kernel to a custom call where there is no `nki` (`kernels.py`): its name, and the arguments
that are no tensors as JSON in `backend_config`. HBM bytes are those of the kernel's own DMA on all of its cores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

from kimi_k2.nki.kernels import MODULES
from nki_emulator.dtypes import NUMPY
from nki_emulator.install import install
from nki_emulator.launch import Kernel, argument
from nki_emulator.storage import Region

PREFIX = "kimi_k2.nki."
CHOICES = 8  # experts of a token
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
        collectives: those inside, in order: kind as HLO names it, ranks, bytes of the result. One between SBUFs is of
            both cores, each with its own result.
    """

    read: tuple[int, ...]
    indexed: tuple[int, ...]
    written: int
    collectives: tuple[tuple[str, int, int], ...] = ()


def kernel_name(attributes: str) -> str | None:
    """Which kernel of ours a custom call is, by its attributes in HLO text; None if it is none."""
    target = _TARGET.search(attributes)
    if target is None or not target[1].startswith(PREFIX):
        return None
    return target[1].removeprefix(PREFIX)


def call_cost(attributes: str, operands: tuple[Operand, ...]) -> CallCost | None:
    """Cost of a custom call by its attributes in HLO text; None if it is no kernel of ours."""
    name, config = kernel_name(attributes), _CONFIG.search(attributes)
    if name is None:
        return None
    assert config is not None, attributes
    text = json.loads(config[1]) if config[1].startswith('"') else config[1]
    return _run(name, text, operands)


@cache
def _run(name: str, config: str, operands: tuple[Operand, ...]) -> CallCost:
    arguments: dict[str, Any] = json.loads(config)
    named, cores = arguments.pop("named"), arguments.pop("cores")
    arrays = [np.zeros(dims, NUMPY[_DTYPES[dtype]]) for dtype, dims in operands]
    return cost_of(name, cores, dict(zip(named, arrays, strict=True)), arguments)


def cost_of(name: str, cores: int, arrays: dict[str, Any], arguments: dict[str, Any]) -> CallCost:
    """Cost of a kernel over arrays by name, which are zeros; the other ranks' summands are left out.

    Routers are made to choose as many of the rank's experts as it has of them on average.
    """
    install()
    module = import_module(f"kimi_k2.nki.kernels.{MODULES[name]}")
    kernel: Kernel = getattr(module, name)[cores]
    region = Region.shared_hbm if cores > 1 else Region.private_hbm
    _choose_by_bias(arrays, arguments["num_experts"])
    tensors = {field: argument(array, region) for field, array in arrays.items()}
    ranks: dict[str, int] = {}
    for field, operation in (("groups", "all_reduce"), ("cache_groups", "all_to_all")):
        if field in arguments:
            ranks[operation] = len(arguments[field][0])
            arguments = {**arguments, field: ((0,),)}
    kernel(**arguments, **_with_layers(tensors, module.layer_of))
    assert kernel.last is not None
    positions = {tensor.storage.number: number for number, tensor in enumerate(tensors.values())}
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
                elif box.storage in positions:
                    read[positions[box.storage]] += size
                    indexed[positions[box.storage]] += size * by_index
    return CallCost(tuple(read), tuple(indexed), written, tuple(_collectives(kernel.last.traces, ranks)))


def _collectives(traces: list[list[Any]], ranks: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Of all cores' instructions, which come to the same collectives; see `CallCost`."""
    of_cores = ([instruction for instruction in trace if instruction.engine == "collective"] for trace in traces)
    for same in zip(*of_cores, strict=True):
        results = [[box for box in one.accesses if box.written] for one in same]
        counted = results if results[0][0].region.on_chip else results[:1]
        size = sum(box.nbytes for boxes in counted for box in boxes)
        yield same[0].operation.replace("_", "-"), ranks[same[0].operation], size


def hbm_bytes_of(box: Any) -> int:
    """Bytes of one operand of a DMA that lie in HBM; indices are none."""
    return 0 if box.region.on_chip or box.operand.endswith("(index)") else box.nbytes


def _with_layers(named: dict[str, Any], layer_of: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Tensors `layers.N.FIELD` as the kernel's layers, the others by their names."""
    others: dict[str, Any] = {}
    layers: dict[int, dict[str, Any]] = {}
    for name, tensor in named.items():
        if name.startswith("layers."):
            _, number, field = name.split(".")
            layers.setdefault(int(number), {})[field] = tensor
        else:
            others[name] = tensor
    if layers:
        others["layers"] = tuple(layer_of(layers[number]) for number in sorted(layers))
    return others


def _choose_by_bias(arrays: dict[str, Any], num_experts: int) -> None:
    """Correction biases by which all routers choose experts of which a rank holds its average share."""
    local = next(array for name, array in arrays.items() if name.endswith("gate_up")).shape[0]
    local_mask = [slot * local % num_experts < local for slot in range(CHOICES)]
    numbers = [
        local_mask[:slot].count(is_local) + (0 if is_local else local) for slot, is_local in enumerate(local_mask)
    ]
    for name, array in arrays.items():
        if name.endswith("bias"):
            array[0, numbers] = np.arange(2 * CHOICES, CHOICES, -1)
