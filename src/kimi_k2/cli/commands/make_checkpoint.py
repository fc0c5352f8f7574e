"""`kimi-k2 make-checkpoint`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.errors import resumable
from kimi_k2.cli.options import DEFAULT_MODEL, Model, Seed, StoredFormatOption
from kimi_k2.terminal import say


def make_checkpoint(
    out: Annotated[Path, typer.Argument(help="Directory to write.", file_okay=False)],
    model: Model = DEFAULT_MODEL,
    fmt: StoredFormatOption = None,
    full: Annotated[
        bool, typer.Option("--full", help="Start from the published sizes instead of the tiny ones.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=NUMBER", help="Override a config field, e.g. num_hidden_layers=4."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Write a synthetic checkpoint in the exact Hugging Face format, from a few MB to tens of GB, in a stream."""
    from kimi_k2.checkpoint.names import all_tensors
    from kimi_k2.config import KimiK2Config
    from kimi_k2.progress import ByteProgress
    from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
    from kimi_k2.synthetic.config import tiny_config, with_format

    changes = dict(_parse_override(text) for text in overrides or [])
    config = KimiK2Config.from_preset(model, **changes) if full else tiny_config(model, **changes)
    if fmt is not None:
        config = with_format(config, fmt)
    total = sum(spec.nbytes for spec in all_tensors(config))
    with resumable(), ByteProgress("writing", total) as bar:
        write_synthetic_checkpoint(out, config, seed=seed, on_tensor=lambda spec: bar.advance(spec.nbytes))
    say(f"wrote {total / 1e9:.3f} GB of tensors to {out}")


def _parse_override(text: str) -> tuple[str, int | float]:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.synthetic.config import TINY

    field, _, value = text.partition("=")
    if field not in KimiK2Config.model_fields:
        raise typer.BadParameter(f"unknown field '{field}'; tiny defaults exist for: {', '.join(TINY)}")
    for kind in (int, float):
        try:
            return field, kind(value)
        except ValueError:
            continue
    raise typer.BadParameter(f"{field}: expected a number, got {value!r}")


COMMAND = Command(
    "make-checkpoint",
    make_checkpoint,
    "Checkpoints",
    (
        "kimi-k2 make-checkpoint /tmp/tiny --model kimi-k2-thinking",
        "kimi-k2 make-checkpoint /tmp/real --full --set num_hidden_layers=2 --set n_routed_experts=32",
    ),
)
