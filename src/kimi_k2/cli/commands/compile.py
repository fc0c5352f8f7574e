"""`kimi-k2 compile`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.errors import resumable
from kimi_k2.cli.options import DEFAULT_DEPLOYMENT, parse_layers


def compile_model(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or a published name for --hlo-only.")],
    preset: Annotated[str, typer.Option(help="Name of a file in configs/, or a path to one.")] = DEFAULT_DEPLOYMENT,
    out: Annotated[
        Path, typer.Option(help="Directory for NEFFs or HLO text and the manifest.", file_okay=False)
    ] = Path("compiled"),
    weights: Annotated[
        Path | None, typer.Option(help="Directory of `convert`'s files, linked into --out.", file_okay=False)
    ] = None,
    capture_layers: Annotated[
        str | None,
        typer.Option(help="Graphs for `parity --compiled`, which also return these layers' outputs, e.g. 0,1,30,60."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the memory plan and stop.")] = False,
    hlo_only: Annotated[
        bool, typer.Option("--hlo-only", help="Write HLO text; needs NxD's source, no Neuron device.")
    ] = False,
) -> None:
    """Compile for Trainium: print the memory plan, then write a NEFF a graph (or its HLO text)."""
    from kimi_k2.config import KimiK2Config
    from kimi_k2.errors import ConfigError
    from kimi_k2.neuron import compile as job
    from kimi_k2.plan.deployment import Deployment

    chosen = Deployment.load(preset)
    if chosen.hardware.target != "neuron":
        raise ConfigError(f"expected a Trainium deployment, {chosen.name} is for {chosen.instance}", field="preset")
    plan = job.check_fit(KimiK2Config.load(model), chosen)
    typer.echo(f"{chosen.name} on {chosen.instance}, memory a logical core:")
    typer.echo("\n".join(job.plan_lines(plan)))
    if dry_run:
        return
    if hlo_only:
        from kimi_k2.neuron import standins

        os.environ.setdefault("PJRT_DEVICE", "CPU")
        standins.install()
        with resumable():
            job.lower_all(chosen, model, out, typer.echo)
    else:
        options = {}
        if capture_layers is not None:
            from kimi_k2.parity.nxdi import capture_options

            config = KimiK2Config.load(model)
            options = capture_options(config, parse_layers(capture_layers, config), chosen.tp_degree)
        job.check_sdk()
        if weights is not None:
            job.take_weights(weights, out)
        with resumable():
            job.compile_all(chosen, model, out, typer.echo, **options)


COMMAND = Command(
    "compile",
    compile_model,
    "Deploy",
    (
        "kimi-k2 compile /models/Kimi-K2-Instruct-0905 --preset trn2-tp32-ep2 --out /presharded",
        "kimi-k2 compile kimi-k2-instruct-0905 --preset trn2-tp32-ep2 --out /tmp/hlo --hlo-only",
    ),
)
