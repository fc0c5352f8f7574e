"""`kimi-k2 profile`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.options import number


def profile(
    preset: Annotated[str, typer.Option(help="A GPU deployment: a file of configs/, or its name.")],
    model: Annotated[
        str, typer.Option(help="Published name, or a directory with config.json.")
    ] = "kimi-k2-instruct-0905",
    weights: Annotated[Path | None, typer.Option(help="Output of `convert --target cuda`; else synthetic.")] = None,
    layers: Annotated[
        int | None,
        number(1, "Fewer layers than the model has; the total is then extrapolated."),
    ] = None,
    stand_in: Annotated[
        bool, typer.Option("--stand-in", help="One GPU as rank 0 of the deployment; nothing is sent.")
    ] = False,
    batch: Annotated[int | None, number(1, "Sequences, instead of the preset's.")] = None,
    context: Annotated[int | None, number(1, "Cached tokens, instead of the preset's.")] = None,
    prompt: Annotated[int, number(0, "Tokens of the prefill that TTFT is of; 0 for none.")] = 1024,
    kernels: Annotated[str | None, typer.Option(help="op=name,...: pins, as KIMI_K2_KERNELS.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print the chosen kernels.")] = False,
    launches: Annotated[bool, typer.Option("--launches", help="Print what one step launches, by time.")] = False,
) -> None:
    """Time a decode step and a prefill on one GPU or, under torchrun, on several: TPOT, TTFT, and each part."""
    from kimi_k2.bench.kernels.profile import Job
    from kimi_k2.bench.kernels.profile import profile as measure
    from kimi_k2.config import KimiK2Config
    from kimi_k2.ops import registry
    from kimi_k2.plan.deployment import Deployment

    if kernels:
        registry.pin(kernels)
    config, deployment = KimiK2Config.load(model), Deployment.load(preset)
    if deployment.hardware.target != "cuda":
        raise typer.BadParameter(f"{preset} is for {deployment.instance}, expected one for GPUs", param_hint="--preset")
    job = Job(
        batch=batch or deployment.batch_size,
        context=context or deployment.seq_len,
        prompt=prompt,
        layers=layers,
        weights=weights,
        stand_in=stand_in,
        launches=launches,
    )
    lines = measure(config, deployment.layout(config), job)
    if lines:
        typer.echo("\n".join(lines))
        if verbose:
            typer.echo(registry.explain())


COMMAND = Command("profile", profile, "Measure and prove")
