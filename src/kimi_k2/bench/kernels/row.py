"""One line of the kernel benchmark, shared by the operations' modules and `kimi-k2 bench kernels`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A timed call.

    Attributes:
        operation: e.g. "gate".
        case: the shape, e.g. "384 experts, T=64".
        implementation: "ours" or the peer's name.
        microseconds: median of CUDA-graph replays.
        bytes: the fewest that must move: each input read and each output written once.
        flops: matrix operations, 0 if there are none.
        target: microseconds aimed at, None if no target was set.
    """

    operation: str
    case: str
    implementation: str
    microseconds: float
    bytes: float
    flops: float = 0.0
    target: float | None = None

    @property
    def gigabytes_per_second(self) -> float:
        """Rate at which memory is read and written, in GB/s (10^9 bytes)."""
        return self.bytes / self.microseconds / 1e3

    @property
    def teraflops(self) -> float:
        """Rate of floating-point operations, in TFLOP/s."""
        return self.flops / self.microseconds / 1e6

    def share(self, bandwidth: float, matrix_rate: float) -> float:
        """The larger of the shares of `bandwidth` (GB/s) and of `matrix_rate` (TFLOP/s) that this call reaches."""
        return max(self.gigabytes_per_second / bandwidth, self.teraflops / matrix_rate)
