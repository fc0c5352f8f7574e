"""`kimi-k2 bench tune`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.cli.options import DEFAULT_MODEL, Configuration, listed, listed_numbers
from kimi_k2.terminal import say


def tune(
    model: Configuration = DEFAULT_MODEL,
    only: Annotated[
        str | None, typer.Option(metavar="A,B", help="experts, linear, attention; all if not given.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Experts of ranks (TP8, EP8, TP2-EP4 ...); all of 1 to 8 if not given."),
    ] = None,
    tokens: Annotated[str | None, typer.Option(metavar="1,2", help="Of experts; 1 to 32768 if not given.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory of the tuning files; the package's if not given.", file_okay=False)
    ] = None,
) -> None:
    """Find the fastest launches of experts, linears and MLA attention on this GPU and write its tuning files."""
    from kimi_k2.bench.kernels.tune import tune as tune_operations
    from kimi_k2.config import KimiK2Config

    counts = listed_numbers(tokens, "--tokens") or None
    tune_operations(listed(only), KimiK2Config.load(model), listed(shape) or None, counts, out, say)
