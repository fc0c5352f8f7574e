"""`kimi-k2 plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.errors import DOES_NOT_FIT
from kimi_k2.cli.options import DEFAULT_DEPLOYMENT, Download, DraftTokens, Preset, number, picture, refuse
from kimi_k2.terminal import new_console, say

if TYPE_CHECKING:
    from rich.console import Console

    from kimi_k2.config import KimiK2Config


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Published name (kimi-k2-instruct-0905 ...) or checkpoint directory.")],
    preset: Preset = DEFAULT_DEPLOYMENT,
    max_model_len: Annotated[int | None, number(1, "Tokens a sequence; the preset's by default.")] = None,
    batch_size: Annotated[int | None, number(1, "Sequences; the preset's by default.")] = None,
    prompt_length: Annotated[int | None, number(1, "Tokens of the modelled prefill.")] = None,
    draft: Annotated[
        str | None,
        typer.Option(metavar="HEAD", help="Eagle3 head (directory or name; llama, mla: of the published sizes)."),
    ] = None,
    draft_tokens: DraftTokens = 3,
    measured: Annotated[
        list[Path] | None,
        typer.Option(help="JSON of nccom-test, neuron-profile or rehearse, for what is assumed; repeatable."),
    ] = None,
    published: Annotated[
        bool, typer.Option("--published", help="Also check the planner against published memory figures.")
    ] = False,
    chart: Annotated[
        Path | None, typer.Option(callback=picture, help="Write a stacked bar chart (PNG, SVG, PDF).")
    ] = None,
    all_presets: Annotated[
        bool, typer.Option("--all-presets", help="One table of every preset in configs/, and stop.")
    ] = False,
    gpus: Annotated[
        bool, typer.Option("--gpus", help="One table of layouts on one to four hosts of H100s and H200s, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, all of it.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print all of it as tables.")] = False,
    download: Download = False,
) -> None:
    """Plan a deployment: whether it fits, a modelled time a token, the largest items; exit status 3 if it does not fit.

    Reads config.json alone, and the index if there is one. --verbose: memory a rank, host, bytes and operations a step.
    """
    from dataclasses import replace

    from kimi_k2.checkpoint.hub import resolve_checkpoint
    from kimi_k2.config import KimiK2Config
    from kimi_k2.plan.memory import read_index
    from kimi_k2.plan.report import make_answer, make_report, plot, print_answer, print_report
    from kimi_k2.plan.target import check_context, load_target

    if all_presets:
        refuse(context, "--all-presets takes presets as they are", but=("all_presets", "model", "as_json", "download"))
    if gpus:
        lengths = ("max_model_len", "batch_size")
        refuse(context, "not of --gpus", but=("gpus", "model", "as_json", "download", *lengths))
    if as_json:
        refuse(context, "prints tables: not with --json", "verbose")
    if draft is None:
        refuse(context, "goes with --draft", "draft_tokens")
    directory = resolve_checkpoint(model, download=download, weights=False)
    config = KimiK2Config.load(directory)
    console = new_console(table=True)
    check_context(config, max_model_len)
    if all_presets or gpus:
        _tables(config, console, gpus, max_model_len or 4096, batch_size, as_json)
        return
    target = load_target(preset, config).with_lengths(max_model_len, batch_size, prompt_length)
    if draft is not None:
        from kimi_k2.drafts.config import FORMS, DraftConfig
        from kimi_k2.plan.drafts import with_drafts
        from kimi_k2.synthetic.draft import PUBLISHED_VOCABULARY, draft_fields

        if form := next((one for one in FORMS.values() if one == draft), None):
            fields = draft_fields(config, form, draft_vocab_size=min(PUBLISHED_VOCABULARY, config.vocab_size))
            head = DraftConfig.from_dict(fields)
        else:
            head = DraftConfig.from_pretrained(resolve_checkpoint(draft, download=download, weights=False))
        target = with_drafts(target, config, head, draft_tokens)
    if measured:
        from kimi_k2.plan.measured import read_measured

        target = replace(target, machine=read_measured(measured).on(target.machine))
    made = (make_report if verbose or as_json else make_answer)(config, target)
    report = {"model": Path(model).name, "index": read_index(directory), **made}
    if published:
        from kimi_k2.plan.comparison import comparison, print_comparison

        report["published"] = comparison()
    if chart is not None:
        plot(config, target, chart)
    if as_json:
        say(json.dumps(report, indent=1))
    else:
        (print_report if verbose else print_answer)(report, console)
        if published:
            print_comparison(report["published"], console)
    if not report["rank_memory"]["fits"]:
        raise typer.Exit(DOES_NOT_FIT)


def _tables(
    config: KimiK2Config, console: Console, gpus: bool, tokens: int, batch_size: int | None, as_json: bool
) -> None:
    """Layouts of GPUs side by side, or all presets."""
    from dataclasses import asdict

    from kimi_k2.plan import presets
    from kimi_k2.plan.comparison import gpu_lines

    console.width = max(console.width, presets.WIDTH)
    if gpus:
        ways = presets.served_rows(config, tokens, batch_size)
        if as_json:
            say(json.dumps({"modelled": [asdict(row) for row in ways], "published": gpu_lines()}, indent=1))
        else:
            presets.print_served(ways, tokens, console)
        return
    rows = presets.preset_rows(config)
    if as_json:
        say(json.dumps([asdict(row) for row in rows], indent=1))
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
