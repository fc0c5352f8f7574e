"""`kimi-k2 plan`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.errors import DOES_NOT_FIT
from kimi_k2.cli.options import (
    DEFAULT_DEPLOYMENT,
    Download,
    DraftTokens,
    OptionalCount,
    Preset,
    picture,
    refuse,
    with_groups,
)
from kimi_k2.files import Json
from kimi_k2.terminal import new_console, say

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.plan.deployment import Target


@dataclass(frozen=True)
class Lengths:
    """In place of the preset's.

    Attributes:
        max_model_len: Tokens a sequence; the preset's by default.
        batch_size: Sequences; the preset's by default.
        prompt_length: Tokens of the modelled prefill.
    """

    max_model_len: OptionalCount = None
    batch_size: OptionalCount = None
    prompt_length: OptionalCount = None


@dataclass(frozen=True)
class Beside:
    """What changes the deployment's step: drafts, and measured figures.

    Attributes:
        measured: JSON of nccom-test, neuron-profile or rehearse, for what is assumed; repeatable.
    """

    draft: Annotated[
        str | None,
        typer.Option(metavar="HEAD", help="Eagle3 head (directory or name; llama, mla: of the published sizes)."),
    ] = None
    draft_tokens: DraftTokens = 3
    measured: list[Path] | None = None

    def applied(self, target: Target, download: bool) -> Target:
        """The target with both."""
        if self.draft is not None:
            from kimi_k2.checkpoint.hub import resolve_checkpoint
            from kimi_k2.drafts.config import FORMS, DraftConfig
            from kimi_k2.plan.drafts import with_drafts
            from kimi_k2.synthetic.draft import PUBLISHED_VOCABULARY, draft_fields

            if form := next((form for form in FORMS.values() if form == self.draft), None):
                config = target.config
                fields = draft_fields(config, form, draft_vocab_size=min(PUBLISHED_VOCABULARY, config.vocab_size))
                head = DraftConfig.from_dict(fields)
            else:
                head = DraftConfig.from_pretrained(resolve_checkpoint(self.draft, download=download, weights=False))
            target = with_drafts(target, head, self.draft_tokens)
        if self.measured:
            from kimi_k2.plan.measured import read_measured

            target = replace(target, machine=read_measured(self.measured).on(target.machine))
        return target


@dataclass(frozen=True)
class Printed:
    """What is printed.

    Attributes:
        all_presets: One table of every preset in configs/, and stop.
        gpus: One table of layouts on one to four hosts of H100s and H200s, and stop.
        as_json: Print JSON, all of it.
    """

    chart: Annotated[Path | None, typer.Option(callback=picture, help="Write a stacked bar chart (PNG, SVG, PDF).")] = (
        None
    )
    all_presets: bool = False
    gpus: bool = False
    as_json: bool = False
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print all of it as tables, and published runs beside the planner.")
    ] = False


@with_groups
def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Published name (kimi-k2-instruct-0905 ...) or checkpoint directory.")],
    lengths: Lengths,
    beside: Beside,
    printed: Printed,
    preset: Preset = DEFAULT_DEPLOYMENT,
    download: Download = False,
) -> None:
    """Plan a deployment: whether it fits, a modelled time a token, the largest items; exit status 3 if it does not fit.

    Reads config.json alone, and the index if there is one. --verbose: memory a rank, host, bytes and operations a step.
    """
    from kimi_k2.checkpoint.hub import resolve_checkpoint
    from kimi_k2.config import KimiK2Config
    from kimi_k2.plan.comparison import comparison, print_comparison
    from kimi_k2.plan.deployment import check_context, load_target
    from kimi_k2.plan.report import make_answer, make_report, plot, print_answer, print_report

    if printed.all_presets:
        refuse(context, "--all-presets takes presets as they are", but=("all_presets", "model", "as_json", "download"))
    if printed.gpus:
        sizes = ("max_model_len", "batch_size")
        refuse(context, "not of --gpus", but=("gpus", "model", "as_json", "download", *sizes))
    if printed.as_json:
        refuse(context, "prints tables: not with --json", "verbose")
    if beside.draft is None:
        refuse(context, "goes with --draft", "draft_tokens")
    directory = resolve_checkpoint(model, download=download, weights=False)
    config = KimiK2Config.load(directory)
    check_context(config, lengths.max_model_len)
    if printed.all_presets or printed.gpus:
        _tables(config, lengths, printed)
        return
    target = load_target(preset, config).with_lengths(lengths.max_model_len, lengths.batch_size, lengths.prompt_length)
    target = beside.applied(target, download)
    report: Json = {"model": Path(model).name, "index": _index(directory)}
    if printed.as_json:
        report |= {**make_report(target), "published": comparison()}
        say(json.dumps(report, indent=1))
    elif printed.verbose:
        report |= make_report(target)
        console = new_console(table=True)
        print_report(report, console)
        print_comparison(comparison(), console)
    else:
        report |= make_answer(target)
        print_answer(report, new_console(table=True))
    if printed.chart is not None:
        plot(target, printed.chart)
    if not report["rank_memory"]["fits"]:
        raise typer.Exit(DOES_NOT_FIT)


def _index(directory: Path) -> Json | None:
    """Size and number of shards as the index states them; the shards need not be there. None without an index."""
    from kimi_k2.checkpoint.index import INDEX_NAME, CheckpointIndex

    if not os.path.lexists(directory / INDEX_NAME):  # a link that leads nowhere is one
        return None
    index = CheckpointIndex.read(directory)
    assert index.weight_map is not None
    return {"total_size": index.total_size, "shards": len(index.shards), "tensors": len(index.weight_map)}


def _tables(config: KimiK2Config, lengths: Lengths, printed: Printed) -> None:
    """Layouts of GPUs side by side, or all presets."""
    from kimi_k2.plan import presets
    from kimi_k2.plan.comparison import gpu_lines

    console = new_console(table=True)
    console.width = max(console.width, presets.WIDTH)
    if printed.gpus:
        tokens = lengths.max_model_len or 4096
        ways = presets.served_rows(config, tokens, lengths.batch_size)
        if printed.as_json:
            say(json.dumps({"modelled": [asdict(row) for row in ways], "published": gpu_lines()}, indent=1))
        else:
            presets.print_served(ways, tokens, console)
        return
    rows = presets.preset_rows(config)
    if printed.as_json:
        say(json.dumps(rows, indent=1))
    else:
        presets.print_presets(rows, console)


COMMAND = Command(
    "plan",
    plan,
    "Deploy",
    (
        "kimi-k2 plan kimi-k2-instruct-0905 --preset trn2-tp32-ep2",
        "kimi-k2 plan kimi-k2-thinking --preset h200-tp8 --max-model-len 131072 --verbose",
    ),
)
