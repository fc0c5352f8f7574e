"""`kimi-k2 verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def verify(output: Annotated[Path, typer.Argument(help="Directory that `convert` wrote.")]) -> None:
    """Read all files again and compare every tensor with the manifest's checksum."""
    from kimi_k2.progress import ByteProgress
    from kimi_k2.sharding.manifest import load_manifest
    from kimi_k2.sharding.manifest import verify as verify_files

    total = sum(load_manifest(output)["files"].values())
    with ByteProgress("verifying", total) as bar:
        count = sum(1 for _ in verify_files(output, bar.advance))
    typer.echo(f"{count} files as the manifest says")
