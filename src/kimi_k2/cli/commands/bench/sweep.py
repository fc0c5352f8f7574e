"""`kimi-k2 bench sweep`, the default of `kimi-k2 bench`."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k2.cli.errors import resumable
from kimi_k2.cli.options import Ranks, RunOptions, listed_numbers, number, refuse, with_groups
from kimi_k2.terminal import say

if TYPE_CHECKING:
    from kimi_k2.bench.backend import Backend
    from kimi_k2.bench.sweep import Settings
    from kimi_k2.plan.deployment import Deployment


@with_groups
def sweep(
    context: typer.Context,
    running: RunOptions,
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or `tiny` for a synthetic one.")] = "tiny",
    out: Annotated[
        Path, typer.Option(help="Directory for sweep.json, tables, plots and report.html.", file_okay=False)
    ] = Path("bench"),
    output_lengths: Annotated[str, typer.Option(help="Tokens to generate, comma-separated.")] = "16,32,64,128,256,512",
    prompt_lengths: Annotated[str, typer.Option(help="Tokens of the prompt, comma-separated.")] = "128",
    batch_sizes: Annotated[str, typer.Option(help="Sequences at once, comma-separated.")] = "1",
    runs: Annotated[int, number(1, "Timed runs of each cell.")] = 5,
    ranks: Ranks = None,
    compare_files: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Compare two sweep.json and stop.", metavar="A B")
    ] = None,
) -> None:
    """Time prefill and decode over lengths and batch sizes; the same command continues an interrupted sweep."""
    if compare_files is not None:
        refuse(context, "--compare reads two results and runs nothing", but=("compare_files",))
        _print_comparison(*compare_files)
        return
    backend = running.backend
    running.check(context, "dtype")
    if ranks is not None and running.keep_quantized is False:
        raise typer.BadParameter("ranks hold weights as they are stored", param_hint="--dequantize")

    import torch

    from kimi_k2.api import compute_defaults
    from kimi_k2.bench.backend import NeuronBackend, TorchBackend
    from kimi_k2.bench.errors import SweepError
    from kimi_k2.bench.ranks import RanksBackend
    from kimi_k2.bench.render import markdown, write_reports
    from kimi_k2.bench.sweep import Settings, run_sweep
    from kimi_k2.checkpoint.hub import resolve_checkpoint
    from kimi_k2.plan.deployment import Deployment
    from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
    from kimi_k2.synthetic.config import tiny_config

    settings = Settings(
        model="tiny" if model == "tiny" else Path(model).name,
        backend=backend,
        output_lengths=_numbers("output_lengths", output_lengths),
        prompt_lengths=_numbers("prompt_lengths", prompt_lengths),
        batch_sizes=_numbers("batch_sizes", batch_sizes),
        runs=runs,
    )
    name, stored = compute_defaults(backend, running.dtype, running.keep_quantized)
    compute, options = getattr(torch, name), (running.kv_cache_dtype, running.batch_invariant)
    with tempfile.TemporaryDirectory(prefix="kimi-k2-bench-") as scratch, ExitStack() as stack:
        directory = Path(scratch) if model == "tiny" else resolve_checkpoint(model)
        if model == "tiny":
            write_synthetic_checkpoint(directory, tiny_config())
        used: Backend
        if backend == "neuron":
            deployment = Deployment.load(running.preset)
            if running.on_cpu:
                used = NeuronBackend(directory, _on_cpu(settings, deployment), None)
            else:
                used = NeuronBackend(directory, deployment, running.compiled or directory)
        elif ranks is not None:
            used = stack.enter_context(RanksBackend.load_ranks(directory, ranks, backend, compute, *options))
        else:
            used = TorchBackend.load(directory, backend, compute, stored, *options)
        if isinstance(used, RanksBackend) and used.part.number > 0:
            used.follow()
            return
        with resumable():
            results = run_sweep(settings, used, out / "sweep.json", say=lambda line: say(line, err=True))
    written = write_reports(results, out)
    say(markdown(results))
    say(f"wrote {', '.join(path.name for path in [out / 'sweep.json', *written])} to {out}")
    if failed := sum(cell["status"] != "ok" for cell in results["cells"]):
        raise SweepError(f"{failed} of {len(results['cells'])} cells failed; the same command tries them again")


def _on_cpu(settings: Settings, preset: Deployment) -> Deployment:
    from kimi_k2.bench.errors import SweepError
    from kimi_k2.neuron.application import cpu_deployment

    if len(settings.batch_sizes) > 1:
        raise SweepError(f"batch_sizes: the neuron backend has one batch size, got {list(settings.batch_sizes)}")
    length = max(settings.prompt_lengths) + max(settings.output_lengths)
    return cpu_deployment(preset, length=length, batch_size=settings.batch_sizes[0])


def _numbers(field: str, text: str) -> tuple[int, ...]:
    return tuple(sorted(set(listed_numbers(text, f"--{field.replace('_', '-')}"))))


def _print_comparison(first: Path, second: Path) -> None:
    from rich.table import Table

    from kimi_k2.bench.render import DRIFT, compare, differing, overall
    from kimi_k2.bench.results import load_results
    from kimi_k2.terminal import new_console

    a, b = load_results(first), load_results(second)
    ratios = compare(a, b)
    table = Table(
        "prompt",
        "batch",
        "output",
        "metric",
        "B / A",
        "over runs",
        "B is",
        title=f"B against A (noise: overlapping runs, or less than {100 * DRIFT:g} %)",
    )
    for one in ratios:
        shape = (str(one.prompt_length), str(one.batch_size), str(one.output_length))
        table.add_row(*shape, one.metric, f"{one.ratio:.3f}", f"{one.low:.3f} to {one.high:.3f}", one.verdict)
    console = new_console(table=True)
    console.print(table)
    means = ", ".join(f"{metric} {value:.3f}" for metric, value in overall(ratios).items())
    console.print(f"geometric means of B / A: {means}", highlight=False)
    for line in differing(a, b):
        console.print(f"differs: {line}", highlight=False, soft_wrap=True)
