"""`kimi-k2 bench kernels`, `experts` and `drafts`: single parts of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kimi_k2.cli.options import (
    DEFAULT_MODEL,
    BatchInvariant,
    Checkpoint,
    Configuration,
    DraftTokens,
    Ranks,
    listed,
    listed_numbers,
    number,
    refuse,
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


def experts(
    context: typer.Context,
    model: Configuration = DEFAULT_MODEL,
    format_: Annotated[
        str | None, typer.Option("--format", metavar="A,B", help="FP8, INT4, BF16; all if not given.")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Ranks' parts; TP1 to TP8, EP4 and EP8 if not given. FlyDSL's: E64, E128, E384."
        ),
    ] = None,
    routing: Annotated[
        str | None, typer.Option(metavar="A,B", help="uniform, same or zipf:EXPONENT; five of them if not given.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option(metavar="1,2", help="Token counts; powers of two to 65536 if not given.")
    ] = None,
    drawn: Annotated[int, number(0, "So many cases drawn from these instead of all; tokens up to the most.")] = 0,
    seed: Annotated[int, number(0, "Of --drawn.")] = 0,
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

    if not drawn:
        refuse(context, "goes with --drawn", "seed")
    names = {"formats": listed(format_), "layouts": listed(shape), "routings": listed(routing)}
    options = {**names, "tokens": listed_numbers(tokens, "--tokens")}
    chosen = {name: value for name, value in options.items() if value}
    selection = Selection(**chosen, with_peers=peers, drawn=drawn, seed=seed)  # type: ignore[arg-type]
    run(KimiK2Config.load(model), selection, out, say, seconds=seconds)


def drafts(
    checkpoint: Checkpoint,
    draft: Annotated[str, typer.Option(metavar="HEAD", help="Eagle3 head (directory or name), or ngram.")],
    draft_tokens: DraftTokens = 3,
    max_new_tokens: Annotated[int, number(1, "Tokens of a reply at most.")] = 128,
    backend: Annotated[Literal["cpu", "cuda"], typer.Option(help="Who runs the model.")] = "cpu",
    batch_invariant: BatchInvariant = False,
    ranks: Ranks = None,
    runs: Annotated[int, number(1, "Timed replies of each kind; the median counts.")] = 3,
) -> None:
    """Greedy speed with --draft beside none in one run: acceptance by position, tokens a step, milliseconds a token."""
    from kimi_k2.api import KimiK2
    from kimi_k2.bench.drafts import PROMPTS, compare
    from kimi_k2.engine.generate import Generator

    with KimiK2.open(
        checkpoint,
        backend=backend,
        sampling={"max_new_tokens": max_new_tokens, "temperature": 0.0},
        batch_invariant=batch_invariant,
        ranks=ranks,
        draft=draft,
        draft_tokens=draft_tokens,
    ) as session:
        assert isinstance(session.generator, Generator)
        ids = [session.prompt([{"role": "user", "content": text}]).ids for text in PROMPTS]
        for line in compare(session.generator, ids, session.params, runs):
            if session.rank == 0:
                say(line)
