"""`kimi-k2 convert`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.errors import resumable
from kimi_k2.cli.options import (
    EXPERTS,
    Download,
    ExpertsOption,
    OptionalCount,
    TargetOption,
    refuse,
    with_groups,
)
from kimi_k2.terminal import say

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.experts import ConversionError
    from kimi_k2.sharding.layout import Layout


@dataclass(frozen=True)
class Cut:
    """For which ranks, and in which formats.

    Attributes:
        preset: Deployment (a file of configs/, or a path to one) instead of the options below.
        tp: Ranks that share one expert; 32, with an ep of 2.
        ep: Groups that the experts are divided among; ranks = tp x ep.
    """

    preset: str | None = None
    tp: OptionalCount = None
    ep: OptionalCount = None
    target: TargetOption = "neuron"
    experts: ExpertsOption = None

    def layout(self, context: typer.Context, config: KimiK2Config) -> Layout:
        """The preset's, or that of the options; the experts' format is by default what the target runs best."""
        from kimi_k2.sharding.layout import Layout

        if self.preset is not None:
            from kimi_k2.plan.deployment import Deployment

            refuse(context, "the preset says it", "tp", "ep", "target", "experts")
            return Deployment.load(self.preset).layout(config)
        tp, ep = (32, self.ep or 2) if self.tp is None else (self.tp, self.ep or 1)  # of trn2-tp32-ep2
        return Layout(tp, ep, self.target, self.experts or EXPERTS[self.target])


@dataclass(frozen=True)
class Care:
    """What is looked at besides.

    Attributes:
        report: Measure the experts' conversion error.
        allow_nonfinite: Convert NaN, Inf and impossible scales too.
        verify_source: Hash the source's bytes, so that a copy of it can go on.
        verify_output: Read a finished conversion again and make what is damaged anew.
    """

    report: bool = True
    allow_nonfinite: bool = False
    verify_source: bool = False
    verify_output: bool = False


@with_groups
def convert(
    context: typer.Context,
    source: Annotated[str, typer.Argument(help="Checkpoint directory; with --dry-run a published name will do.")],
    cut: Cut,
    care: Care,
    output: Annotated[Path | None, typer.Argument(help="Directory to write.", file_okay=False)] = None,
    only_sizes: Annotated[bool, typer.Option("--dry-run", help="Print sizes and stop; reads no weights.")] = False,
    download: Download = False,
) -> None:
    """Cut a checkpoint into one file a rank; the same command resumes an interrupted run.

    Of a finished conversion it looks at sizes and headers alone; `--verify-output` compares every tensor's bytes.
    """
    from kimi_k2.checkpoint.hub import resolve_checkpoint
    from kimi_k2.config import KimiK2Config
    from kimi_k2.progress import ByteProgress
    from kimi_k2.sharding.presharder import Presharder

    if only_sizes:
        refuse(context, "--dry-run reads and writes no weights", *(field.name for field in fields(Care)))
    source = str(resolve_checkpoint(source, download=download, weights=not only_sizes))
    config = KimiK2Config.load(source)
    layout = cut.layout(context, config)
    if only_sizes:
        _print_dry_run(config, layout)
        return
    if output is None:
        raise typer.BadParameter("give the directory to write", param_hint="OUTPUT")
    with resumable(), ByteProgress("converting", None) as bar:
        job = Presharder(
            source, output, layout, report=care.report, allow_nonfinite=care.allow_nonfinite,
            verify_source=care.verify_source, on_bytes=bar.advance, on_layer=_print_error,
        )  # fmt: skip
        bar.total = job.reader.total_bytes
        manifest = job.run(verify_output=care.verify_output)
    if job.looked_through:
        say("finished before: sizes and headers are right, --verify-output compares the bytes")
    if manifest["errors"]["total"]["values"]:
        say("all layers: " + _describe(manifest["errors"]["total"]))
    say(f"{len(manifest['files'])} files of {next(iter(manifest['files'].values())):,} bytes in {output}")


def _describe(error: dict[str, float]) -> str:
    return (
        f"relative L2 {error['relative_l2']:.2e}, max {error['max_error']:.2e},"
        f" {error['changed']:,} of {error['values']:,} values changed"
    )


def _print_error(layer: int, error: ConversionError | None) -> None:
    if error is not None:
        say(f"layer {layer}: {_describe(error.as_dict())}")


def _print_dry_run(config: KimiK2Config, layout: Layout) -> None:
    from kimi_k2.sharding.dry_run import FOLD_FLOPS, READ_BYTES, dry_run

    plan = dry_run(config, layout)
    hours = plan.seconds() / 3600
    folds = f" and {FOLD_FLOPS / 1e9:g} GFLOP/s a core of folds" if plan.fold_flops else ""
    for label, value in (
        ("input", f"{plan.input_bytes:,} bytes"),
        (
            "output",
            f"{plan.output_bytes:,} bytes: {plan.ranks} files of {plan.rank_bytes:,}, {plan.tensors} tensors each",
        ),
        ("peak memory", f"{plan.peak_memory / 1e9:.1f} GB (estimate)"),
        ("time", f"{hours:.1f} h, extrapolated from {READ_BYTES / 1e6:g} MB/s of input{folds}"),
    ):
        say(f"{label:12} {value}")


COMMAND = Command(
    "convert",
    convert,
    "Checkpoints",
    (
        "kimi-k2 convert /models/Kimi-K2-Instruct-0905 /presharded --preset trn2-tp32-ep2",
        "kimi-k2 convert /models/Kimi-K2-Thinking /ranks --target cuda --experts stored --tp 8",
        "kimi-k2 convert kimi-k2-instruct-0905 --preset trn2-tp32-ep2 --dry-run",
    ),
)
