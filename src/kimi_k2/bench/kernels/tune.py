"""Find the fastest launch of the routed experts for each token count on this GPU and write its tuning files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kimi_k2.bench.kernels import moe, w4a16
from kimi_k2.bench.kernels.harness import read_bandwidth
from kimi_k2.errors import KernelError
from kimi_k2.kernels.experts.tuning import DIRECTORY, ExpertChoice, file_name, save_choices

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 4096, 16384]


@dataclass(frozen=True)
class Case:
    """A rank's shape: its experts, their intermediate size, and the pairs that arrive for each token."""

    experts: int
    inter: int
    top_k: int
    dtype: str = "fp8_e4m3"

    @property
    def block(self) -> str:
        """As the tuning file's name has it."""
        return "128x128" if self.dtype == "fp8_e4m3" else "1x32"

    def weights(self) -> Any:
        """Random ones."""
        if self.dtype == "fp8_e4m3":
            return moe.random_experts(self.experts, self.inter, moe.HIDDEN)
        return w4a16.random_experts(self.experts, self.inter, w2_bf16=self.dtype == "int4_w2_bf16")

    def timer(self, weights: Any, tokens: int) -> Callable[[ExpertChoice], tuple[float, float]]:
        """Microseconds of a launch, and the bytes of weights that it reads."""

        def fp8(choice: ExpertChoice) -> tuple[float, float]:
            timing = moe.time_experts(weights, tokens, self.top_k, choice)
            return timing.microseconds, timing.weight_bytes

        return (
            fp8 if self.dtype == "fp8_e4m3" else lambda choice: w4a16.time_experts(weights, tokens, self.top_k, choice)
        )

    def candidates(self, tokens: int) -> list[ExpertChoice]:
        """The launches worth timing."""
        result: list[ExpertChoice] = (moe if self.dtype == "fp8_e4m3" else w4a16).candidates(
            tokens, self.top_k, self.inter
        )
        return result


CASES = {
    "TP8": Case(384, 256, 8),
    "EP8": Case(48, 2048, 1),
    "TP4": Case(384, 512, 8),
    "EP4": Case(96, 2048, 2),
    "INT4-TP4": Case(384, 512, 8, "int4"),
    "INT4-TP8": Case(384, 256, 8, "int4"),
    "INT4-TP4-W2-BF16": Case(384, 512, 8, "int4_w2_bf16"),
}


def tune(
    shapes: Sequence[str] | None, tokens: Sequence[int] | None, out: Path | None, say: Callable[[str], None]
) -> None:
    """Time every candidate and write the tuning files; say the winner's time, bandwidth and share of the bandwidth.

    Args:
        shapes: names of CASES; None for all.
        tokens: token counts; None for TOKENS.
        out: directory of the tuning files; None for the package's.
        say: takes each line.

    Raises:
        KernelError: there is no CUDA device, or no such shape.
    """
    if unknown := sorted(set(shapes or ()) - set(CASES)):
        raise KernelError(f"shape: {', '.join(unknown)} not among {', '.join(CASES)}")
    if not torch.cuda.is_available():
        raise KernelError("no CUDA device")
    ceiling = read_bandwidth()
    say(f"read bandwidth {ceiling:.0f} GB/s")
    for name in shapes or CASES:
        case = CASES[name]
        weights = case.weights()
        chosen = {}
        for count in tokens or TOKENS:
            timer = case.timer(weights, count)
            timed = [(*timer(choice), choice) for choice in case.candidates(count)]
            microseconds, moved, chosen[count] = min(timed, key=lambda one: one[0])
            rate = moved / microseconds / 1e3
            say(f"{name} T={count}: {microseconds:.1f} us {rate:.0f} GB/s {rate / ceiling:.1%} {chosen[count]}")
        file = file_name(case.experts, case.inter, moe.HIDDEN, case.dtype, case.block, torch.cuda.get_device_name())
        save_choices((out or DIRECTORY) / file, chosen)
        del weights
        torch.cuda.empty_cache()
