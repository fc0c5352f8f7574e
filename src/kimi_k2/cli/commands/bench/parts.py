"""`kimi-k2 bench kernels`, `experts` and `tune`: operations on a GPU; `bench tools`: a server's tool calls."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kimi_k2.cli.options import (
    DEFAULT_MODEL,
    Configuration,
    Listed,
    Natural,
    listed,
    listed_numbers,
    number,
    refuse,
    with_groups,
)
from kimi_k2.terminal import say


def kernels(
    context: typer.Context,
    only: Annotated[str | None, typer.Option(metavar="A,B", help="Operations to run; all if not given.")] = None,
    peers: Annotated[bool, typer.Option(help="Also time PyTorch and the peers that can be imported.")] = True,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.", dir_okay=False)] = None,
    drawn: Annotated[int, number(0, "So many drawn batches of MLA decode instead of the standard rows.")] = 0,
    seed: Annotated[int, number(0, "Of --drawn.")] = 0,
) -> None:
    """Time the fast operations on this GPU beside the ceilings measured in the same run and the peers installed."""
    from kimi_k2.bench.kernels.table import run

    if not drawn:
        refuse(context, "goes with --drawn", "seed")
    if drawn and only not in (None, "mla"):
        raise typer.BadParameter("draws batches of MLA decode: with --only mla or none", param_hint="--drawn")
    run(listed(only), peers, out, say, drawn=drawn, seed=seed)


@dataclass(frozen=True)
class Cases:
    """Which cases are timed.

    Attributes:
        shape: Ranks' parts; TP1 to TP8, EP4 and EP8 if not given. FlyDSL's: E64, E128, E384.
        routing: uniform, same or zipf:EXPONENT; five of them if not given.
        drawn: So many cases drawn from these instead of all; tokens up to the most.
        seed: Of --drawn.
    """

    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="A,B", help="FP8, INT4, BF16 if not given; MXFP4, NVFP4, INT4-64, INT4-128."),
    ] = None
    shape: Listed = None
    routing: Listed = None
    tokens: Annotated[
        str | None, typer.Option(metavar="1,2", help="Token counts; powers of two to 65536 if not given.")
    ] = None
    drawn: Natural = 0
    seed: Natural = 0

    def chosen(self) -> dict[str, Any]:
        """Fields of Selection."""
        names = {"formats": listed(self.format_), "layouts": listed(self.shape), "routings": listed(self.routing)}
        lists = {**names, "tokens": listed_numbers(self.tokens, "--tokens")}
        return {**{name: value for name, value in lists.items() if value}, "drawn": self.drawn, "seed": self.seed}


@with_groups
def experts(
    context: typer.Context,
    cases: Cases,
    model: Configuration = DEFAULT_MODEL,
    peers: Annotated[bool, typer.Option(help="Also time vLLM's kernels, Marlin and DeepGEMM where installed.")] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSON file: of one that is there, of this card and these kernels, the cases it lacks.",
            dir_okay=False,
        ),
    ] = None,
    seconds: Annotated[float | None, number(0, "Begin no case after so many.")] = None,
) -> None:
    """Time the routed experts over routings and layouts beside the peers installed, each checked against float64."""
    from kimi_k2.bench.kernels.experts import Selection, run
    from kimi_k2.config import KimiK2Config

    if not cases.drawn:
        refuse(context, "goes with --drawn", "seed")
    run(KimiK2Config.load(model), Selection(**cases.chosen(), with_peers=peers), out, say, seconds=seconds)


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


def tools(
    url: Annotated[str, typer.Argument(help="OpenAI server, such as http://localhost:8000/v1.")],
    requests: Annotated[Path, typer.Argument(help="Chat requests with tools, a JSON object a line.", dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Directory for outcomes.jsonl and summary.json.", file_okay=False)] = Path(
        "tools"
    ),
    reference: Annotated[
        Path | None, typer.Option(help="outcomes.jsonl of a trusted server, for the trigger's F1.", dir_okay=False)
    ] = None,
    concurrency: Annotated[int, number(1, "Requests at once.")] = 8,
) -> None:
    """Check a server's tool calls: whether they come when they should, and whether they fit their schema."""
    from kimi_k2.bench.tools import Endpoint, verify

    server = Endpoint(url, os.environ.get("OPENAI_API_KEY"))
    summary = verify(server, requests, out, reference=reference, concurrency=concurrency)
    for name, value in summary.items():
        shown = "-" if value is None else f"{value:.2%}" if isinstance(value, float) else str(value)
        say(f"{name:32} {shown}")
