"""`kimi-k2 bench reader`, `context`, `convert`, `kernels`, `experts` and `serving`: one part, or others' results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.cli.options import (
    DEFAULT_MODEL,
    Checkpoint,
    Configuration,
    ModelOptions,
    Ranks,
    SamplingOptions,
    listed,
    listed_numbers,
    number,
    picture,
    refuse,
    with_groups,
)


def reader(
    checkpoint: Checkpoint,
    repeats: Annotated[int, number(1, "Runs of each combination; the median counts.")] = 5,
) -> None:
    """Reading speed and memory beside a plain safetensors loop, in one run."""
    from kimi_k2.bench.reader import measure, report

    report(measure(checkpoint, repeats))


def context(
    checkpoint: Checkpoint,
    plot: Annotated[Path, typer.Option(help="Picture to write.", callback=picture)] = Path("decode-context.png"),
    repeats: Annotated[int, number(1, "Steps at each length; the median counts.")] = 30,
    threads: Annotated[int, number(1, "CPU threads.")] = 1,
) -> None:
    """Decode step cost against context, 64 to 4096 tokens, absorbed MLA: a table and a plot."""
    import torch

    from kimi_k2.api import load_model
    from kimi_k2.bench.context import measure, report

    torch.set_num_threads(threads)
    report(measure(load_model(checkpoint, attention_form="absorbed"), repeats=repeats), plot)


def convert(
    checkpoint: Checkpoint,
    work: Annotated[Path, typer.Argument(help="Directory to write to; emptied after each job.", file_okay=False)],
    tp: Annotated[int, number(1, "As of `convert`.")] = 64,
    ep: Annotated[int, number(1, "As of `convert`.")] = 1,
    jobs: Annotated[str | None, typer.Option(metavar="A,B", help="Jobs to run; all if not given.")] = None,
) -> None:
    """Throughput and memory of conversion beside a plain copy and the straightforward method, in one run."""
    from kimi_k2.bench.convert import compare

    compare(checkpoint, work, tp, ep, listed(jobs) or None, typer.echo)


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
    run(listed(only), peers, out, typer.echo, drawn=drawn, seed=seed)


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
    replays: Annotated[int | None, number(1, "Replays that the median is of; by the tokens if not given.")] = None,
    drawn: Annotated[int, number(0, "So many cases drawn from these instead of all; tokens up to the most.")] = 0,
    seed: Annotated[int, number(0, "Of --drawn.")] = 0,
    peers: Annotated[bool, typer.Option(help="Also time vLLM's kernels, Marlin and DeepGEMM where installed.")] = True,
    out: Annotated[Path | None, typer.Option(help="File of JSON lines to write.", dir_okay=False)] = None,
    resume: Annotated[
        bool, typer.Option(help="Keep --out's rows: time the cases it lacks, then those of other kernels.")
    ] = False,
    seconds: Annotated[float | None, number(0, "Begin no case after so many.")] = None,
) -> None:
    """Time the routed experts over routings and layouts beside the peers installed, each checked against float64."""
    from kimi_k2.bench.kernels.experts import Selection, run
    from kimi_k2.config import KimiK2Config

    if not drawn:
        refuse(context, "goes with --drawn", "seed")
    if out is None:
        refuse(context, "goes with --out", "resume")
    names = {"formats": listed(format_), "layouts": listed(shape), "routings": listed(routing)}
    options = {**names, "tokens": listed_numbers(tokens, "--tokens"), "replays": replays}
    chosen = {name: value for name, value in options.items() if value}
    selection = Selection(**chosen, with_peers=peers, drawn=drawn, seed=seed)  # type: ignore[arg-type]
    run(KimiK2Config.load(model), selection, out, typer.echo, resume=resume, seconds=seconds)


@with_groups
def drafts(
    context: typer.Context,
    checkpoint: Checkpoint,
    sampling: SamplingOptions,
    model: ModelOptions,
    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="Message; repeat for a batch.")] = None,
    runs: Annotated[int, number(1, "Timed replies of each kind; the median counts.")] = 3,
    ranks: Ranks = None,
) -> None:
    """Speed with --draft beside none in one run: acceptance by position, tokens a step, milliseconds a token."""
    if model.draft is None:
        raise typer.BadParameter("expected an Eagle3 head or ngram", param_hint="--draft")
    if model.backend == "neuron":
        raise typer.BadParameter("--draft goes with --backend cpu or cuda")
    from kimi_k2.api import KimiK2
    from kimi_k2.bench.drafts import PROMPTS, compare
    from kimi_k2.engine.generate import Generator

    texts = prompt or PROMPTS
    options = model.options(context, batch_size=len(texts))
    with KimiK2.open(checkpoint, params=sampling.params(), ranks=ranks, **options) as session:
        assert isinstance(session.generator, Generator)
        ids = [session.prompt([{"role": "user", "content": text}]).ids for text in texts]
        for line in compare(session.generator, ids, session.params, runs):
            if session.rank == 0:
                typer.echo(line)


def serving(
    results: Annotated[list[Path], typer.Argument(help="Files of `vllm bench serve --save-result`.", dir_okay=False)],
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.", dir_okay=False)] = None,
) -> None:
    """One table of what `vllm bench serve` measured of servers: TTFT, TPOT, ITL, E2EL and throughput."""
    from kimi_k2.bench.serving import markdown
    from kimi_k2.files import replace_file

    table = markdown(results)
    typer.echo(table)
    if out is not None:
        replace_file(out, table)
