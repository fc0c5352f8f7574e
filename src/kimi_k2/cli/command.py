"""What a module of `cli.commands` says of its command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import typer
from rich.markup import escape

Panel = Literal["Run a model", "Checkpoints", "Deploy", "Measure and prove"]
PANELS: tuple[Panel, ...] = get_args(Panel)


@dataclass(frozen=True)
class Command:
    """One command of `kimi-k2`.

    Attributes:
        name: as typed.
        call: a function with `Annotated` options, or a group of commands.
        panel: of the help text that lists it.
        examples: command lines that the help text ends with.
    """

    name: str
    call: Callable[..., Any] | typer.Typer
    panel: Panel
    examples: tuple[str, ...] = ()

    def add_to(self, app: typer.Typer) -> None:
        """Make it a command of `app`."""
        epilog = "\n\n".join(["Examples:", *(escape(line) for line in self.examples)]) if self.examples else None
        if isinstance(self.call, typer.Typer):
            app.add_typer(self.call, name=self.name, rich_help_panel=self.panel, epilog=epilog)
        else:
            app.command(self.name, rich_help_panel=self.panel, epilog=epilog)(self.call)
