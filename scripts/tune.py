"""Find the fastest launch of the FP8 experts for each token count on this GPU and write its tuning file."""

from __future__ import annotations

from pathlib import Path

import torch
import typer

from kimi_k2.kernels.bench.harness import read_bandwidth
from kimi_k2.kernels.bench.moe import HIDDEN, SHAPES, candidates, random_experts, time_experts
from kimi_k2.kernels.moe_tuning import DIRECTORY, file_name, save_choices

TOKENS = [1, 2, 4, 8, 16, 32, 64, 128, 512, 1024, 4096, 16384]


def main(
    shape: list[str] = typer.Option(list(SHAPES), help="shapes to tune"),
    tokens: list[int] = typer.Option(TOKENS, help="token counts"),
    out: Path = typer.Option(DIRECTORY, help="directory of the tuning files"),
) -> None:
    """Times every candidate; prints the winner's time, bandwidth and share of the read bandwidth measured here."""
    ceiling = read_bandwidth()
    print(f"read bandwidth {ceiling:.0f} GB/s")
    for name in shape:
        experts, inter, top_k = SHAPES[name]
        weights = random_experts(experts, inter, HIDDEN)
        chosen = {}
        for count in tokens:
            timed = [(time_experts(weights, count, top_k, c), c) for c in candidates(count, top_k, inter)]
            best, chosen[count] = min(timed, key=lambda pair: pair[0].microseconds)
            rate = best.gigabytes_per_second
            print(
                f"{name} T={count}: {best.microseconds:.1f} us {rate:.0f} GB/s {rate / ceiling:.1%} {chosen[count]}",
                flush=True,
            )
        device = torch.cuda.get_device_name()
        save_choices(out / file_name(experts, inter, HIDDEN, "fp8_e4m3", "128x128", device), chosen)
        del weights
        torch.cuda.empty_cache()


if __name__ == "__main__":
    typer.run(main)
