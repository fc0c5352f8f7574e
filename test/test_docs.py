"""README and docs: links lead somewhere, commands and their options exist, and those that can run do."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kimi_k2.cli import app

ROOT = Path(__file__).parents[1]
ShellCommands = Callable[[str], list[list[str]]]
README = ROOT / "README.md"
DOCS = [README, *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("contrib/models/*/README.md"))]
SECTION = "## Anywhere"


def inline_commands(text: str) -> list[list[str]]:
    """`kimi-k2 ...` and `python scripts/...` in running text and tables."""
    spans = re.findall(r"`((?:kimi-k2 |python scripts/|scripts/|pytest )[^`\n]+)`", text)
    return [shlex.split(span) for span in spans]


def anchors(text: str) -> set[str]:
    """GitHub's anchors of the headings."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if re.match(r"https?://", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), target


def check_options(words: list[str], command: Any) -> None:
    """Every option that the words give belongs to the command."""
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in known, f"{command.name} has no {word}"


@pytest.mark.parametrize("path", DOCS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(path: Path, shell_commands: ShellCommands) -> None:
    text = path.read_text(encoding="utf-8")
    listed = shell_commands(text)
    group: Any = get_command(app)
    checked = 0
    for words in listed + inline_commands(text):
        if words[:2] == ["torchrun", "--nproc-per-node"]:
            words = words[4:] if words[3] == "--no-python" else ["python", *words[3:]]
        program = Path(words[0]).name
        if program == "kimi-k2":
            command, options = group, words[1:]
            while hasattr(command, "commands") and options and options[0] in command.commands:
                command, options = command.commands[options[0]], options[1:]
            if command.name == "bench":
                command = command.commands["sweep"]  # the default
            if hasattr(command, "commands"):  # a group that is spoken of, not called
                options = [word for word in options if word != "--help"]
                assert all(word.startswith("--") for word in options), words
                check_options(options, command)
                continue
            check_options(options, command)
        elif program == "make":
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        elif words[:2] == ["python", "-m"]:
            assert importlib.util.find_spec(words[2]) is not None, words
        elif words[0].startswith(("python", "scripts/")):
            script = next(word for word in words if word.startswith("scripts/"))
            source = (ROOT / script).read_text(encoding="utf-8")
            usage = subprocess.run(
                [sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True, check=True,
                env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
            ).stdout  # fmt: skip
            for word in words:
                assert not word.startswith("--") or word in usage or word in source, f"{script} has no {word}"
        elif program == "pytest":
            for word in words[1:]:
                if "/" in word and not word.startswith("-"):
                    assert (ROOT / word).exists(), word
        else:
            continue
        checked += 1
    assert checked or not listed


def test_the_readme_is_read_in_two_minutes() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 90


def test_the_first_commands_run(tmp_path: Path, shell_commands: ShellCommands) -> None:
    """The README's section for any machine, then the Python example, in a directory of their own."""
    text = README.read_text(encoding="utf-8")
    section = text[text.index(SECTION) :].split("\n## ")[0]
    ran = 0
    for words in shell_commands(section):
        assert words[0] == "kimi-k2", words
        arguments = [word.replace("/tmp/", f"{tmp_path}/") for word in words[1:]]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (words, done.output, done.exception)
        ran += 1
    assert ran == 4
    architecture = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", architecture, re.DOTALL)
    assert code is not None
    exec(compile(code[1].replace("/tmp/", f"{tmp_path}/"), "architecture.md", "exec"), {})
