"""A command is one file."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kimi_k2.cli import commands
from kimi_k2.cli.app import find_commands

FILE = '''
import typer
from kimi_k2.cli.command import Command

def toy(word: str) -> None:
    """Repeat a word."""
    typer.echo(word * 2)

COMMAND = Command("toy", toy, "Deploy")
'''


def test_a_file_in_the_package_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.py").write_text(FILE)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    app = typer.Typer()
    for command in find_commands():
        command.add_to(app)
    done = CliRunner().invoke(app, ["toy", "ab"])
    assert (done.exit_code, done.output) == (0, "abab\n")
    assert "Repeat a word." in CliRunner().invoke(app, ["--help"]).output
