"""`kimi-k2 tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.options import number


def tune(
    model: Annotated[
        str, typer.Option(help="Published name, or a directory with config.json.")
    ] = "kimi-k2-instruct-0905",
    shape: Annotated[
        list[str] | None, typer.Option(help="A rank's part (TP8, EP8, TP2-EP4 ...); all of 1 to 8 ranks if not given.")
    ] = None,
    tokens: Annotated[list[int] | None, number(1, "Token counts; 1 to 32768 if not given.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the tuning files; the package's if not given.", file_okay=False)
    ] = None,
) -> None:
    """Find the fastest launch of the routed experts for each token count on this GPU and write its tuning files."""
    from kimi_k2.bench.kernels.tune import tune as tune_experts
    from kimi_k2.config import KimiK2Config

    tune_experts(KimiK2Config.load(model), shape, tokens, out, typer.echo)


COMMAND = Command("tune", tune, "Deploy")
