"""What a module of `cli.commands` says of its command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import typer

Panel = Literal["Run a model", "Checkpoints", "Deploy", "Measure and prove"]
PANELS: tuple[Panel, ...] = get_args(Panel)


@dataclass(frozen=True)
class Command:
    """One command of `kimi-k2`.

    Attributes:
        name: as typed.
        call: a function with `Annotated` options, or a group of commands.
        panel: of the help text that lists it.
    """

    name: str
    call: Callable[..., Any] | typer.Typer
    panel: Panel

    def add_to(self, app: typer.Typer) -> None:
        """Make it a command of `app`."""
        if isinstance(self.call, typer.Typer):
            app.add_typer(self.call, name=self.name, rich_help_panel=self.panel)
        else:
            app.command(self.name, rich_help_panel=self.panel)(self.call)
