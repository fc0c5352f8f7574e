"""The command `kimi-k2` in this process, its output in a pipe."""

from __future__ import annotations

from collections.abc import Mapping

from typer.testing import CliRunner, Result

from kimi_k2.cli import app


def kimi(
    *words: object, status: int | None = 0, input: str | None = None, env: Mapping[str, str] | None = None
) -> Result:
    """What a command line of these words prints; it must end with `status`, None for any."""
    done = CliRunner().invoke(app, list(map(str, words)), input=input, env=env)
    assert status in (None, done.exit_code), (done.exit_code, done.output, done.exception)
    return done
