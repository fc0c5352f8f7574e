"""Published rates of a NeuronCore-v3 (Trainium2), and the cycles that an instruction takes by them. Modelled.

Sources in aws-neuron-sdk: `trainium2_arch.rst` (frequencies, Vector Engine's performance mode),
`trainium_inferentia2_arch.rst` (a matmul starts every max(N, 64) cycles, float32 four times that; Vector Engine N
cycles for one input, 2 N for two), `nki/api/nki/isa` (`nc_matmul`: twice as fast where a float32 operand is flagged as
ones and zeros), `nki.api.shared.rst` (at least 64 cycles an instruction; reciprocal 8 N on the
Vector Engine), `nki-dma-bandwidth-guide.rst` (16 engines of 23 B/ns; 1,300 ns from semaphore to start). The cycles of
the older guide are taken to hold for Trainium2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nki_emulator.core import Access, Instruction
from nki_emulator.storage import Region


@dataclass(frozen=True)
class Rates:
    """What the model takes a core to do.

    Attributes:
        hertz: by engine.
        least_cycles: of an instruction on a compute engine.
        dma_bytes_a_second: all 16 engines.
        dma_latency: seconds from the trigger to the first byte.
        descriptor_bytes: what a descriptor costs beyond its own bytes. Assumed: with 512 a run of 256 bytes reaches
            33 % of the peak, 2 KiB 80 % and 4 KiB 89 %; the guide names these knees without figures.
        collective_seconds: of a collective, whatever its size. Assumed: published figures differ.
    """

    hertz: tuple[tuple[str, float], ...] = (
        ("tensor", 2.4e9),
        ("vector", 0.96e9),
        ("scalar", 1.2e9),
        ("gpsimd", 1.2e9),
        ("sync", 1.2e9),
    )
    least_cycles: int = 64
    dma_bytes_a_second: float = 368e9
    dma_latency: float = 1.3e-6
    descriptor_bytes: int = 512
    collective_seconds: float = 15e-6


TRAINIUM2 = Rates()
_TWO_INPUTS = {"tensor_tensor", "scalar_tensor_tensor", "tensor_tensor_scan"}
_FAST = {"tensor_copy", "tensor_scalar", "tensor_tensor", "memset"}
_HALF_WIDTH = {"bfloat16", "float16"}


def descriptors(instruction: Instruction) -> int:
    """Runs of contiguous bytes that a DMA moves, by the shorter side."""
    boxes = _moved(instruction)
    if not boxes:
        return 0
    run = min(box.run for box in boxes)
    return math.ceil(boxes[-1].nbytes / run)


def moved_bytes(instruction: Instruction) -> int:
    """Bytes that a DMA writes."""
    return sum(box.nbytes for box in _moved(instruction) if box.written)


def hbm_bytes(instruction: Instruction) -> int:
    """Bytes that a DMA reads from HBM or writes to it."""
    return sum(box.nbytes for box in _moved(instruction) if not box.region.on_chip)


def _moved(instruction: Instruction) -> list[Access]:
    return [box for box in instruction.accesses if not box.operand.endswith("(index)")]


def seconds(instruction: Instruction, rates: Rates = TRAINIUM2) -> float:
    """Time that an instruction occupies its engine, without the latency of a DMA."""
    if instruction.engine == "dma":
        moved = moved_bytes(instruction) + descriptors(instruction) * rates.descriptor_bytes
        return moved / rates.dma_bytes_a_second
    if instruction.engine == "collective":
        return rates.collective_seconds
    return cycles(instruction, rates) / dict(rates.hertz)[instruction.engine]


def cycles(instruction: Instruction, rates: Rates = TRAINIUM2) -> float:
    """Cycles of a compute engine."""
    size = max((box.free_size for box in instruction.accesses), default=0)
    details = instruction.details
    if instruction.engine == "tensor":
        passes = (2 if details.get("transpose") or details.get("onezero") else 4) if details.get("wide") else 1
        return max(float(details.get("moving", size)), rates.least_cycles) * passes
    if instruction.engine == "vector":
        size *= 8 if instruction.operation == "reciprocal" else 2 if instruction.operation in _TWO_INPUTS else 1
        size /= _speedup(instruction)  # type: ignore[assignment]
    return max(float(size), rates.least_cycles)


def _speedup(instruction: Instruction) -> int:
    """The Vector Engine's performance mode: 16-bit floats, contiguous, in SBUF."""
    if instruction.operation not in _FAST or any(box.dtype not in _HALF_WIDTH for box in instruction.accesses):
        return 1
    in_psum = any(box.region is Region.psum for box in instruction.accesses)
    dense = all(box.run >= 2 * min(box.free_size, 2) for box in instruction.accesses)
    if instruction.operation == "tensor_tensor":
        return 1 if in_psum else 2
    return 2 if in_psum or not dense else 4
