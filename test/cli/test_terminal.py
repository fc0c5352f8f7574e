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

import pytest

import kimi_k2
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

PROGRAM = Path(__file__).with_name("on_terminal.py")
SOURCE = Path(kimi_k2.__file__).parent
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
# Pictures, or escapes of Python's and JSON's.
SHOWN = re.compile("[␀-␡\ufffd]|\\\\x1b|\\\\u001b|\\\\u202e")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each place of `on_terminal.py` prints on a pty."""
    root = tmp_path_factory.mktemp("terminal")
    write_synthetic_checkpoint(
        root / "source", with_format(tiny_config("kimi-k2.5", num_hidden_layers=1), "bf16"), seed=1
    )
    ours, theirs = pty.openpty()
    # Of a terminal without colours rich writes no escapes of its own: each that comes is foreign.
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "200", "TMPDIR": str(root)}
    with subprocess.Popen(
        [sys.executable, str(PROGRAM), str(root)], stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        env=environment,
    ) as process:  # fmt: skip
        os.close(theirs)
        text = b"".join(iter(lambda: _read(ours), b"")).decode()
    assert process.returncode == 0, text[-2000:]
    parts = text.replace("\r\n", "\n").split("<<< ")[1:]
    return dict(part.split("\n", 1) for part in parts)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def test_no_raw_control_reaches_a_terminal(printed: dict[str, str]) -> None:
    for place, text in printed.items():
        assert RAW.search(text) is None, (place, text)
    shown = [place for place, text in printed.items() if SHOWN.search(text)]
    assert len(shown) >= 40, sorted(printed.keys() - set(shown))
    assert [place for place, text in printed.items() if "Traceback" in text] == ["a library's log"]
    print(f"\n{len(printed)} places, {len(shown)} with foreign text")


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
