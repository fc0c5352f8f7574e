"""`kimi-k2 plan` and `kimi-k2 bench` on the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kimi_k2.neuron.compile import load_model_config
from kimi_k2.plan.report import make_report, plot, print_published, print_report
from kimi_k2.plan.target import PUBLISHED_PORT, load_target


def plan(
    model: Annotated[str, typer.Argument(help="Published name (kimi-k2-instruct-0905 ...) or checkpoint directory.")],
    preset: Annotated[
        str, typer.Option(help="A file of configs/ (or a path to one), or h200-tpN for N GPUs.")
    ] = "trn2-tp32-ep2",
    context: Annotated[int | None, typer.Option(help="Cache slots a sequence; the preset's by default.")] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences; the preset's by default.")] = None,
    prompt: Annotated[int | None, typer.Option(help="Tokens of the modelled prefill.")] = None,
    port: Annotated[
        bool, typer.Option("--port", help="Arrange the weights as the published port (pull request 131) does.")
    ] = False,
    published: Annotated[
        bool, typer.Option("--published", help="Also check the planner against published memory figures.")
    ] = False,
    chart: Annotated[Path | None, typer.Option(help="Write a stacked bar chart (PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Plan a deployment: memory a rank, host, bytes and operations a step, modelled times. Reads only config.json."""
    config = load_model_config(model)
    target = load_target(preset, config).with_lengths(context, batch, prompt)
    if port:
        target = replace(target, arrangement=PUBLISHED_PORT)
    report = make_report(config, target)
    if chart is not None:
        plot(config, target, chart)
    if as_json:
        typer.echo(json.dumps({"model": Path(model).name, **report}, indent=1))
        return
    console = Console()
    print_report(report, console)
    if published:
        print_published(console)


def register(app: typer.Typer) -> None:
    """Add the commands to `kimi-k2`."""
    app.command("plan")(plan)
