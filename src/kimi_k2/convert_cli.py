"""`kimi-k2 convert`, `verify` and the sharding plan of `inspect`: pre-sharded checkpoints on the command line."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KimiK2Error
from kimi_k2.progress import ByteProgress
from kimi_k2.sharding.dry_run import dry_run
from kimi_k2.sharding.errors import ConversionError
from kimi_k2.sharding.manifest import load_manifest, verify
from kimi_k2.sharding.plan import ExpertOutput, Layout, Target, make_plan
from kimi_k2.sharding.presharder import Presharder

console = Console()


class TargetOption(str, Enum):
    """Where the output is loaded."""

    neuron = "neuron"
    cuda = "cuda"


class ExpertsOption(str, Enum):
    """Format of the routed experts."""

    bf16 = "bf16"
    blockwise = "blockwise"
    per_channel = "per_channel"
    stored = "stored"


Tp = Annotated[int, typer.Option(help="Ranks that share one expert.")]
Ep = Annotated[int, typer.Option(help="Groups that the experts are divided among; ranks = tp x ep.")]
To = Annotated[TargetOption, typer.Option(help="neuron: NxDI's names and layouts; cuda: the checkpoint's own.")]
As = Annotated[
    ExpertsOption | None,
    typer.Option(help="Experts' format: per_channel (neuron's default), blockwise, bf16; stored (cuda's default)."),
]
Spmd = Annotated[bool | None, typer.Option(help="Write expert MLPs' rank numbers; by default when ep is above 1.")]


def make_layout(
    tp: int, ep: int, target: TargetOption, experts: ExpertsOption | None, spmd_rank: bool | None
) -> Layout:
    chosen: ExpertOutput = experts.value if experts else ("stored" if target is TargetOption.cuda else "per_channel")
    where: Target = target.value
    return Layout(tp, ep, where, chosen, spmd_rank=spmd_rank)


def _fail(error: KimiK2Error) -> typer.Exit:
    Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False, soft_wrap=True)
    return typer.Exit(1)


def convert(
    source: Annotated[str, typer.Argument(help="Checkpoint directory; with --dry-run a published name will do.")],
    output: Annotated[Path | None, typer.Argument(help="Directory to write.")] = None,
    tp: Tp = 64,
    ep: Ep = 1,
    target: To = TargetOption.neuron,
    experts: As = None,
    spmd_rank: Spmd = None,
    report: Annotated[bool, typer.Option(help="Measure the experts' conversion error.")] = True,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Convert NaN, Inf and impossible scales too.")
    ] = False,
    only_sizes: Annotated[bool, typer.Option("--dry-run", help="Print sizes and stop; reads no weights.")] = False,
    rate: Annotated[float, typer.Option(help="MB/s of input that the dry run extrapolates the time from.")] = 190.0,
) -> None:
    """Cut a checkpoint into one file a rank; the same command resumes an interrupted run."""
    try:
        layout = make_layout(tp, ep, target, experts, spmd_rank)
        if only_sizes:
            _print_dry_run(KimiK2Config.load(source), layout, rate)
            return
        if output is None:
            raise typer.BadParameter("give the directory to write", param_hint="OUTPUT")
        total = dry_run(KimiK2Config.load(source), layout).input_bytes
        with ByteProgress("converting", total) as bar:
            job = Presharder(
                source, output, layout, report=report, allow_nonfinite=allow_nonfinite,
                on_bytes=bar.advance, on_layer=_print_error,
            )  # fmt: skip
            manifest = job.run()
    except KimiK2Error as error:
        raise _fail(error) from None
    if manifest["errors"]["total"]["values"]:
        console.print("all layers: " + _describe(manifest["errors"]["total"]), highlight=False)
    console.print(f"{len(manifest['files'])} files of {next(iter(manifest['files'].values())):,} bytes in {output}")


def _describe(error: dict[str, float]) -> str:
    return (
        f"relative L2 {error['relative_l2']:.2e}, max {error['max_error']:.2e},"
        f" {error['changed']:,} of {error['values']:,} values changed"
    )


def _print_error(layer: int, error: ConversionError | None) -> None:
    if error is not None:
        console.print(f"layer {layer}: {_describe(error.as_dict())}", highlight=False)


def _print_dry_run(config: KimiK2Config, layout: Layout, rate: float) -> None:
    plan = dry_run(config, layout)
    hours = plan.seconds(rate * 1e6) / 3600
    for label, value in (
        ("input", f"{plan.input_bytes:,} bytes"),
        (
            "output",
            f"{plan.output_bytes:,} bytes: {plan.ranks} files of {plan.rank_bytes:,}, {plan.tensors} tensors each",
        ),
        ("peak memory", f"{plan.peak_memory / 1e9:.1f} GB (estimate)"),
        ("time", f"{hours:.1f} h, extrapolated from {rate:g} MB/s of input"),
    ):
        console.print(f"{label:12} {value}", highlight=False)


def print_sharding(config: KimiK2Config, layout: Layout, layer: int, as_json: bool) -> None:
    """Which slice of which tensor goes to which rank, after checking that all elements are covered."""
    plan = make_plan(config, layout)
    plan.check()
    rows = [
        (t.name, str(t.dtype).removeprefix("torch."), list(t.shape), t.kind, list(t.local_shape)) for t in plan.tensors
    ]
    if as_json:
        names = ("name", "dtype", "shape", "cut", "rank_shape")
        typer.echo(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
        return
    table = Table("tensor", "dtype", "shape", "cut", "on a rank")
    for tensor, row in zip(plan.tensors, rows, strict=True):
        if tensor.layer == layer:
            table.add_row(*(str(cell) for cell in row))
    console.print(table)


def verify_command(output: Annotated[Path, typer.Argument(help="Directory that `convert` wrote.")]) -> None:
    """Read all files again and compare every tensor with the manifest's checksum."""
    try:
        total = sum(load_manifest(output)["files"].values())
        with ByteProgress("verifying", total) as bar:
            count = sum(1 for _ in verify(output, bar.advance))
    except KimiK2Error as error:
        raise _fail(error) from None
    console.print(f"{count} files as the manifest says")


def register(app: typer.Typer) -> None:
    """Add the commands to `kimi-k2`."""
    app.command("convert")(convert)
    app.command("verify")(verify_command)
