"""The command's root: which commands there are, `--version`, and how errors reach the user."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
import typer.core

from kimi_k2 import __version__
from kimi_k2.cli import commands
from kimi_k2.cli.command import PANELS, Command
from kimi_k2.cli.errors import errors_handled
from kimi_k2.terminal import printable, say
from kimi_k2.variables import check_environment


class _Root(typer.core.TyperGroup):
    """All commands; what an error of usage quotes is printable."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """As click's."""
        with _printable_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, context: Any) -> Any:
        """As click's."""
        with _printable_errors():
            return super().invoke(context)


@contextmanager
def _printable_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(getattr(error, "message", None), str) and hasattr(error, "show"):  # click's own
            error.message = printable(error.message)  # type: ignore[attr-defined]
        raise


app = typer.Typer(
    cls=_Root,
    name="kimi-k2",
    help="Run, prove and plan Moonshot's Kimi-K2 family. Start with `kimi-k2 make-checkpoint`, which needs no weights.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def find_commands() -> list[Command]:
    """The `COMMAND` of each module of `cli.commands`, panel by panel: a file that is added there is a command."""
    names = [module.name for module in pkgutil.iter_modules(commands.__path__)]
    registered = [importlib.import_module(f"{commands.__name__}.{name}").COMMAND for name in names]
    return sorted(registered, key=lambda command: (PANELS.index(command.panel), command.name))


for _command in find_commands():
    _command.add_to(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"kimi-k2 {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    # The help text is the app's; a docstring here would replace it.
    del version
    check_environment()


def main(*command: str, arguments: Sequence[str] | None = None) -> None:
    """Run `kimi-k2` and exit.

    Args:
        command: words in front of the arguments: a script of scripts/ is one command.
        arguments: of the command line; None for those of this process.
    """
    with errors_handled():
        app([*command, *(sys.argv[1:] if arguments is None else arguments)], prog_name="kimi-k2")
