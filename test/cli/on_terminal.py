"""Writes foreign text in every way that the package has, to a terminal: `python on_terminal.py`.

Prints `<<< NAME` in front of what each prints.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from rich.panel import Panel
from rich.table import Table

from kimi_k2.cli.app import main
from kimi_k2.cli.display import JsonView, PanelsView, PlainView, TerminalView
from kimi_k2.cli.errors import errors_handled
from kimi_k2.errors import CheckpointError, DoesNotFitError, KimiK2Warning
from kimi_k2.terminal import new_console, say
from kimi_k2.tokenization.deltas import Content, Reasoning, ToolCallArguments, ToolCallStart

# Colours, a C1 control, an override, an isolate, a mark, a bell, a deletion, a carriage return, a line separator.
EVIL = "ev\x1b[31mil\x9b2J\u202eabc\u2066\u200f\x07\x7f\r\u2028"
MESSAGE = SimpleNamespace(
    reasoning_content=EVIL, content=EVIL, tool_calls=(), to_openai=lambda: {"content": EVIL}
)  # fmt: skip
REPLY: Any = SimpleNamespace(text=EVIL, tokens=1, logprobs=(), finish_reason="stop", message=MESSAGE)
DELTAS = [Reasoning(EVIL), Content(EVIL), ToolCallStart(0, "id", EVIL), ToolCallArguments(0, EVIL)]
PROMPTS: Any = [SimpleNamespace(ids=(1,))]


def viewed(make: Callable[[], Any]) -> None:
    view = make()
    view.show(0, REPLY, DELTAS)
    view.ended(0, REPLY)
    view.close({0: REPLY})


def drawn() -> None:
    table = Table(EVIL, title=EVIL)
    table.add_row(EVIL)
    new_console(table=True).print(table, Panel(EVIL, title=EVIL))


def raised(error: Exception) -> None:
    with errors_handled():
        raise error


def warned(category: type[Warning]) -> None:
    with errors_handled():
        warnings.warn(EVIL, category, stacklevel=1)


def logged() -> None:
    """As NxDI logs: by a logger of its own whose handler we did not make."""
    log = logging.getLogger("Neuron")
    log.addHandler(logging.StreamHandler())
    with errors_handled():
        try:
            raise ValueError(EVIL)
        except ValueError:
            log.exception("Removing redundant keys: %s", EVIL)


def variable() -> None:
    name = "KIMI_K2_" + EVIL.replace("\r", "")
    os.environ[name] = "1"
    try:
        main("doctor", arguments=[])
    finally:
        del os.environ[name]


WAYS: dict[str, Callable[[], object]] = {
    "a line": partial(say, EVIL),
    "half a character": partial(say, "ev\ud800il"),
    "a table and a panel": drawn,
    "one reply": partial(viewed, lambda: TerminalView(new_console())),
    "replies in panels": partial(viewed, lambda: PanelsView(new_console(), [EVIL])),
    "replies as JSON": partial(viewed, lambda: JsonView(PROMPTS, None)),  # type: ignore[arg-type]
    "a reply as it is": partial(viewed, lambda: PlainView(1)),
    "a note of ours": partial(warned, KimiK2Warning),
    "a note of others": partial(warned, UserWarning),
    "a library's log": logged,
    "our error": partial(raised, CheckpointError(EVIL, file=EVIL, tensor=EVIL)),
    "what does not fit": partial(raised, DoesNotFitError(EVIL)),
    "an error of the disk": partial(raised, OSError(5, "Input/output error", EVIL)),
    "a bug": partial(raised, ValueError(EVIL)),
    "a variable": variable,
    "a file that is not there": partial(main, "inspect", arguments=[f"/nowhere/{EVIL}"]),
    "an option": partial(main, "inspect", arguments=["/nowhere", f"--{EVIL}"]),
    "a value": partial(main, "make-checkpoint", arguments=["/nowhere/x", "--set", f"{EVIL}=1"]),
    "a choice": partial(main, "generate", arguments=["/nowhere", "--dtype", EVIL]),
}

if __name__ == "__main__":
    for way, write in WAYS.items():
        print(f"<<< {way}", flush=True)
        with suppress(SystemExit):
            write()
