"""What reaches a terminal: text of files, names and models through one function, so that it draws and does not command.

A model may write anything, and so may who made a file. What a terminal would obey, or what turns the order of what is
read, is shown as a picture of itself.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 1000  # columns of a table in a pipe
_REPLACEMENT = 0xFFFD
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
# C1 controls; marks, embeddings, overrides and isolates of directions; separators of lines.
_UNSEEN = (*range(128, 160), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_PICTURES |= dict.fromkeys(_UNSEEN, _REPLACEMENT)
_SURROGATES = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """Text without control characters, bidirectional ones and halves of characters; lines and tabs stay."""
    return encodable(text).translate(_PICTURES)


def encodable(text: str) -> str:
    """Text without halves of characters, which JSON's escapes and names of files can hold and no stream takes."""
    return _SURROGATES.sub(chr(_REPLACEMENT), text)


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Write text to standard output, or to standard error: there, and on a terminal, as `printable` has it."""
    stream = sys.stderr if err else sys.stdout
    shown = printable(str(text)) if err or stream.isatty() else encodable(str(text))
    typer.echo(shown, err=err, nl=nl)


def new_console(*, table: bool = False, **options: Any) -> Console:
    """A console of rich whose text, tables and panels are printable, and in which no text is markup unless asked for.

    Args:
        table: cut no cell in a pipe, however narrow a terminal is taken for granted there.
        options: of rich's Console.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Printable(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            """Segments, those that move the cursor as they are."""
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    console = Printable(**{"markup": False, "emoji": False, "highlight": False, **options})
    if table and not console.is_terminal:
        console.width = WIDE
    return console
