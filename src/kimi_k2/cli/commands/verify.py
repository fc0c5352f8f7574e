"""`kimi-k2 verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.terminal import say


def verify(output: Annotated[Path, typer.Argument(help="Directory that `convert` wrote.")]) -> None:
    """Read all files again and compare headers and every tensor's bytes with the manifest; names all that differ."""
    from kimi_k2.progress import ByteProgress
    from kimi_k2.sharding.manifest import load_manifest
    from kimi_k2.sharding.verify import faults

    files = load_manifest(output)["files"]
    fault_count = 0
    with ByteProgress("verifying", sum(files.values())) as bar:
        for fault in faults(output, bar.advance):
            fault_count += 1
            say(f"error: {fault}", err=True)
    if fault_count:
        raise typer.Exit(1)
    say(f"{len(files)} files as the manifest says")


COMMAND = Command(
    "verify",
    verify,
    "Checkpoints",
    ("kimi-k2 verify /presharded",),
)
