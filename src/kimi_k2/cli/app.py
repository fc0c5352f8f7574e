"""The command's root: which commands there are, `--version`, and how errors reach the user."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from kimi_k2 import __version__
from kimi_k2.cli.bench import bench
from kimi_k2.cli.chat import chat
from kimi_k2.cli.compile import compile_model
from kimi_k2.cli.convert import convert
from kimi_k2.cli.demo import demo
from kimi_k2.cli.doctor import doctor
from kimi_k2.cli.errors import errors_handled
from kimi_k2.cli.generate import generate
from kimi_k2.cli.inspect import inspect
from kimi_k2.cli.make_checkpoint import make_checkpoint
from kimi_k2.cli.parity import parity
from kimi_k2.cli.plan import plan
from kimi_k2.cli.profile import profile
from kimi_k2.cli.tune import tune
from kimi_k2.cli.verify import verify

app = typer.Typer(
    name="kimi-k2",
    help="Run, prove and plan Moonshot's Kimi-K2 family. Start with `kimi-k2 demo`: it needs no weights and no GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
RUN, CHECKPOINTS, DEPLOY, MEASURE = "Run a model", "Checkpoints", "Deploy", "Measure and prove"

app.command(rich_help_panel=RUN)(demo)
app.command(rich_help_panel=RUN)(doctor)
app.command(rich_help_panel=RUN)(chat)
app.command(rich_help_panel=RUN)(generate)
app.command("make-checkpoint", rich_help_panel=CHECKPOINTS)(make_checkpoint)
app.command(rich_help_panel=CHECKPOINTS)(inspect)
app.command(rich_help_panel=CHECKPOINTS)(convert)
app.command(rich_help_panel=CHECKPOINTS)(verify)
app.command(rich_help_panel=DEPLOY)(plan)
app.command("compile", rich_help_panel=DEPLOY)(compile_model)
app.command(rich_help_panel=DEPLOY)(tune)
app.add_typer(bench, rich_help_panel=MEASURE)
app.command(rich_help_panel=MEASURE)(profile)
app.add_typer(parity, rich_help_panel=MEASURE)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kimi-k2 {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # The help text is the app's; a docstring here would replace it.
    del version


def main(*command: str, arguments: Sequence[str] | None = None) -> None:
    """Run `kimi-k2` and exit.

    Args:
        command: words in front of the arguments: a script of scripts/ is one command.
        arguments: of the command line; None for those of this process.
    """
    with errors_handled():
        app([*command, *(sys.argv[1:] if arguments is None else arguments)], prog_name="kimi-k2")
