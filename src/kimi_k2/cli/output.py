"""Where tables are printed."""

from __future__ import annotations

from rich.console import Console

WIDE = 1000


def table_console() -> Console:
    """A console that cuts no cell of a table in a pipe, however narrow a terminal is taken for granted there."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)
