"""`kimi-k2 demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.options import DEFAULT_MODEL, Model, Seed, number


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Keep the checkpoint here instead of in a temporary directory.")
    ] = None,
    model: Model = DEFAULT_MODEL,
    new_tokens: Annotated[int, number(2, "Tokens to decode.")] = 32,
    seed: Seed = 0,
) -> None:
    """Write a small synthetic checkpoint, run it and prove it against transformers.

    Writes an FP8 (for Thinking and K2.5: INT4) checkpoint in the real Hugging Face layout, streams it in, prefills a
    chat prompt, decodes with the compressed cache and compares every logit with transformers. Exits 1 if they differ
    by more than 1e-5.
    """
    from kimi_k2.parity.demo import run_demo

    raise typer.Exit(run_demo(out, model, new_tokens, seed))


COMMAND = Command(
    "demo",
    demo,
    "Run a model",
    ("kimi-k2 demo --model kimi-k2-thinking",),
)
