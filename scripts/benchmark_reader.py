#!/usr/bin/env python3
"""Reading speed and memory beside a plain safetensors loop, in one run."""

from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.bench.reader import measure, report


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory, e.g. of `kimi-k2 make-checkpoint`.")],
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each combination; the median counts.")] = 5,
) -> None:
    """Measure and print."""
    report(measure(checkpoint, repeats))


if __name__ == "__main__":
    typer.run(main)
