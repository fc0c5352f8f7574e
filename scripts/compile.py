"""Compile Kimi-K2 for Trainium, or lower its graphs: `compile.py --preset trn2-tp32-ep2 --model DIR --out DIR`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KimiK2Error
from kimi_k2.neuron import compile as job
from kimi_k2.neuron import standins
from kimi_k2.neuron.preset import NeuronPreset


def main(
    preset: Annotated[str, typer.Option(help="Name of a file in configs/, or a path to one.")],
    model: Annotated[str, typer.Option(help="Checkpoint directory, or a published model's name for --hlo-only.")],
    out: Annotated[Path, typer.Option(help="Directory for NEFFs or HLO text and the manifest.")] = Path("compiled"),
    dry_run: Annotated[bool, typer.Option(help="Print the memory plan and stop.")] = False,
    hlo_only: Annotated[bool, typer.Option(help="Write HLO text; needs NxD's source, no Neuron device.")] = False,
) -> None:
    """Print the memory plan, then compile for a preset."""
    try:
        chosen = NeuronPreset.load(preset)
        plan = job.check_fit(KimiK2Config.load(model), chosen)
        typer.echo(f"{chosen.name} on {chosen.instance}, memory a logical core:")
        typer.echo("\n".join(job.plan_lines(plan)))
        if dry_run:
            return
        if hlo_only:
            os.environ.setdefault("PJRT_DEVICE", "CPU")
            standins.install()
            job.lower_all(chosen, model, out, typer.echo)
        else:
            job.check_sdk()
            job.compile_all(chosen, model, out, typer.echo)
    except KimiK2Error as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
