#!/usr/bin/env python3
"""Decode step cost against context, 64 to 4096 tokens: a table and a plot."""

from pathlib import Path
from typing import Annotated

import torch
import typer

from kimi_k2.bench.context import measure, report
from kimi_k2.cli.loading import load_model


def main(
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint directory, e.g. of `kimi-k2 make-checkpoint`.")],
    plot: Annotated[Path, typer.Option(help="PNG to write.")] = Path("decode-context.png"),
    repeats: Annotated[int, typer.Option(min=1, help="Steps at each length; the median counts.")] = 30,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
) -> None:
    """Measure with the absorbed form and print."""
    torch.set_num_threads(threads)
    report(measure(load_model(checkpoint, attention_form="absorbed"), repeats=repeats), plot)


if __name__ == "__main__":
    typer.run(main)
