"""`kimi-k2 plan` and `kimi-k2 bench` on the command line."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from kimi_k2.bench.backend import Backend, NeuronBackend, TorchBackend
from kimi_k2.bench.compare import DRIFT, compare, differing, overall
from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.ranks import RanksBackend
from kimi_k2.bench.render import markdown, write_reports
from kimi_k2.bench.results import load_results
from kimi_k2.bench.stopwatch import check_tpot
from kimi_k2.bench.sweep import OUTPUT_LENGTHS, Settings, draw_prompts, run_sweep
from kimi_k2.checkpoint.synthetic import tiny_config, write_synthetic_checkpoint
from kimi_k2.config import KimiK2Config
from kimi_k2.neuron.preset import NeuronPreset
from kimi_k2.plan.against_hlo import against_hlo
from kimi_k2.plan.host import read_index
from kimi_k2.plan.report import make_report, plot, print_against_hlo, print_published, print_report
from kimi_k2.plan.target import PUBLISHED_PORT, load_target


class BackendOption(str, Enum):
    """Where the sweep runs."""

    cpu = "cpu"
    cuda = "cuda"
    neuron = "neuron"


class DtypeOption(str, Enum):
    """Compute dtype of the plain model."""

    float32 = "float32"
    bfloat16 = "bfloat16"


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
    hlo: Annotated[
        Path | None, typer.Option(help="Compare with graphs that scripts/compile.py --hlo-only wrote here.")
    ] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a stacked bar chart (PNG).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Plan a deployment: memory a rank, host, bytes and operations a step, modelled times.

    Reads config.json alone, and the index if there is one.
    """
    config = KimiK2Config.load(model)
    target = load_target(preset, config).with_lengths(context, batch, prompt)
    if port:
        target = replace(target, arrangement=PUBLISHED_PORT)
    report = {"model": Path(model).name, "index": read_index(Path(model)), **make_report(config, target)}
    if chart is not None:
        plot(config, target, chart)
    if as_json:
        typer.echo(json.dumps(report, indent=1))
        return
    console = Console()
    print_report(report, console)
    if published:
        print_published(console)
    if hlo is not None:
        print_against_hlo(against_hlo(config, target, hlo), console)


def bench(
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or `tiny` for a synthetic one.")] = "tiny",
    backend: Annotated[BackendOption, typer.Option(help="Where to run.")] = BackendOption.cpu,
    out: Annotated[Path, typer.Option(help="Directory for sweep.json, tables, plots and report.html.")] = Path("bench"),
    output_lengths: Annotated[str, typer.Option(help="Tokens to generate, comma-separated.")] = ",".join(
        map(str, OUTPUT_LENGTHS)
    ),
    prompt_lengths: Annotated[str, typer.Option(help="Tokens of the prompt, comma-separated.")] = "128",
    batch_sizes: Annotated[str, typer.Option(help="Sequences at once, comma-separated.")] = "1",
    runs: Annotated[int, typer.Option(help="Timed runs of each cell.")] = 5,
    warmup: Annotated[int, typer.Option(help="Untimed runs before them.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    dtype: Annotated[DtypeOption, typer.Option(help="Compute dtype (cpu, cuda).")] = DtypeOption.float32,
    keep_quantized: Annotated[
        bool, typer.Option("--keep-quantized", help="Hold weights as stored (cpu, cuda); ranks always do.")
    ] = False,
    ranks: Annotated[
        Path | None, typer.Option(help="Output of `convert --target cuda`, under torchrun (cpu, cuda).")
    ] = None,
    preset: Annotated[str, typer.Option(help="Deployment (neuron).")] = "trn2-tp32-ep2",
    compiled: Annotated[Path | None, typer.Option(help="What scripts/compile.py wrote (neuron).")] = None,
    published: Annotated[bool, typer.Option("--published", help="Show reported Trainium figures beside.")] = False,
    check_stopwatch: Annotated[
        bool, typer.Option("--check-stopwatch", help="Compare TPOT with an independent watch and stop (cpu, cuda).")
    ] = False,
    compare_files: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Compare two sweep.json and stop.", metavar="A B")
    ] = None,
    drift: Annotated[
        float, typer.Option(help="With --compare: percent by which two sweeps of the same code may differ.")
    ] = 100 * DRIFT,
) -> None:
    """Time prefill and decode over lengths and batch sizes; the same command continues an interrupted sweep."""
    if compare_files is not None:
        _print_comparison(*compare_files, drift / 100)
        return
    if ranks is not None and (backend is BackendOption.neuron or check_stopwatch):
        raise typer.BadParameter("--ranks goes with neither the neuron backend nor --check-stopwatch")
    settings = Settings(
        model="tiny" if model == "tiny" else Path(model).name,
        backend=backend.value,
        output_lengths=_numbers("output_lengths", output_lengths),
        prompt_lengths=_numbers("prompt_lengths", prompt_lengths),
        batch_sizes=_numbers("batch_sizes", batch_sizes),
        runs=runs,
        warmup=warmup,
        seed=seed,
    )
    with tempfile.TemporaryDirectory(prefix="kimi-k2-bench-") as scratch, ExitStack() as stack:
        directory = _tiny(Path(scratch)) if model == "tiny" else Path(model)
        used: Backend
        if backend is BackendOption.neuron:
            chosen = NeuronPreset.load(preset)
            used = NeuronBackend(directory, chosen, compiled or directory)
        elif ranks is not None:
            torch_dtype = getattr(torch, dtype.value)
            used = stack.enter_context(RanksBackend.load_ranks(directory, ranks, backend.value, torch_dtype))
        else:
            used = TorchBackend.load(directory, backend.value, getattr(torch, dtype.value), keep_quantized)
        if check_stopwatch:
            _print_stopwatch(settings, used)
            return
        if isinstance(used, RanksBackend) and used.part.number > 0:
            used.follow()
            return
        results = run_sweep(settings, used, out / "sweep.json", say=lambda line: typer.echo(line, err=True))
    written = write_reports(results, out, published)
    typer.echo(markdown(results, published))
    typer.echo(f"wrote {', '.join(path.name for path in [out / 'sweep.json', *written])} to {out}")
    if failed := sum(cell["status"] != "ok" for cell in results["cells"]):
        raise SweepError(f"{failed} of {len(results['cells'])} cells failed; the same command tries them again")


def _tiny(directory: Path) -> Path:
    config: KimiK2Config = tiny_config()
    write_synthetic_checkpoint(directory, config)
    return directory


def _numbers(field: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise SweepError(f"{field}: expected numbers with commas between, got {text!r}") from None


def _print_stopwatch(settings: Settings, backend: Backend) -> None:
    if not isinstance(backend, TorchBackend):
        raise SweepError("--check-stopwatch needs the cpu or cuda backend")
    table = Table("prompt", "batch", "output", "sweep TPOT, ms", "stopwatch, ms", "difference", "bare loop, ms")
    for cell in settings.cells():
        prompts = draw_prompts(settings, backend.vocab_size, cell["batch_size"], cell["prompt_length"])
        taken = check_tpot(backend, prompts, cell["output_length"])
        milliseconds = [f"{taken[name] * 1e3:.4f}" for name in ("sweep", "stopwatch", "bare")]
        difference = f"{(taken['sweep'] / taken['stopwatch'] - 1) * 100:+.2f} %"
        shape = (str(cell[name]) for name in ("prompt_length", "batch_size", "output_length"))
        table.add_row(*shape, *milliseconds[:2], difference, milliseconds[2])
    Console().print(table)


def _print_comparison(first: Path, second: Path, drift: float) -> None:
    a, b = load_results(first), load_results(second)
    ratios = compare(a, b, drift)
    table = Table(
        "prompt",
        "batch",
        "output",
        "metric",
        "B / A",
        "over runs",
        "B is",
        title=f"B against A (noise: overlapping runs, or less than {100 * drift:g} %)",
    )
    for one in ratios:
        shape = (str(one.prompt_length), str(one.batch_size), str(one.output_length))
        table.add_row(*shape, one.metric, f"{one.ratio:.3f}", f"{one.low:.3f} to {one.high:.3f}", one.verdict)
    console = Console()
    console.print(table)
    means = ", ".join(f"{metric} {value:.3f}" for metric, value in overall(ratios).items())
    console.print(f"geometric means of B / A: {means}", highlight=False)
    for line in differing(a, b):
        console.print(f"differs: {line}", highlight=False, soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the commands to `kimi-k2`."""
    app.command("plan")(plan)
    app.command("bench")(bench)
