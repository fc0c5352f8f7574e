"""Foreign text on a real terminal: no control or bidirectional character reaches it raw, from wherever it comes."""

from __future__ import annotations

import ast
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kimi_k2

PROGRAM = Path(__file__).with_name("on_terminal.py")
SOURCE = Path(kimi_k2.__file__).parent
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Pictures, or escapes of Python's and JSON's.
SHOWN = re.compile("[␀-␡\ufffd]|\\\\x1b|\\\\u001b|\\\\u202e")


def printed(directory: Path) -> dict[str, str]:
    """What each way of `on_terminal.py` prints on a pty."""
    ours, theirs = pty.openpty()
    # Of a terminal without colours rich writes no escapes of its own: each that comes is foreign.
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200", "TMPDIR": str(directory)}
    with subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        text = b"".join(iter(lambda: _read(ours), b"")).decode()
    assert process.returncode == 0, text[-2000:]
    found = text.replace("\r\n", "\n").split("<<< ")[1:]
    return dict(each.split("\n", 1) for each in found)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def test_no_raw_control_reaches_a_terminal(tmp_path: Path) -> None:
    """Whatever is printed goes one of these ways, as the next test holds."""
    for way, text in printed(tmp_path).items():
        assert RAW.search(text) is None and SHOWN.search(text), (way, text)
        assert ("Traceback" in text) == (way == "a library's log")


def writes(path: Path) -> Iterator[str]:
    """Calls in a module that write to a terminal by themselves."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name in ("print", "Console", "rich.print") or name.endswith(
            (".echo", ".secho", "stderr.write", "stdout.write")
        ):
            yield name


def test_no_module_writes_to_a_terminal_past_the_one_place() -> None:
    found = {
        path.relative_to(SOURCE).with_suffix("").as_posix()
        for path in SOURCE.rglob("*.py")
        if "contrib_model" not in path.parts and list(writes(path))
    }
    assert found == {"terminal"}
