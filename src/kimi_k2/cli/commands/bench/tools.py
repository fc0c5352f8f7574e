"""`kimi-k2 bench tools`: an OpenAI server's tool calls by the criteria of Moonshot's K2-Vendor-Verifier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.cli.options import number
from kimi_k2.terminal import say


def tools(
    url: Annotated[str, typer.Argument(help="OpenAI server, such as http://localhost:8000/v1.")],
    requests: Annotated[Path, typer.Argument(help="Chat requests with tools, a JSON object a line.", dir_okay=False)],
    out: Annotated[Path, typer.Option(help="Directory for outcomes.jsonl and summary.json.", file_okay=False)] = Path(
        "tools"
    ),
    reference: Annotated[
        Path | None, typer.Option(help="outcomes.jsonl of a trusted server, for the trigger's F1.", dir_okay=False)
    ] = None,
    concurrency: Annotated[int, number(1, "Requests at once.")] = 8,
) -> None:
    """Check a server's tool calls: whether they come when they should, and whether they fit their schema."""
    from kimi_k2.bench.tools.verify import Endpoint, verify

    server = Endpoint(url, os.environ.get("OPENAI_API_KEY"))
    summary = verify(server, requests, out, reference=reference, concurrency=concurrency)
    for name, value in summary.items():
        shown = "-" if value is None else f"{value:.2%}" if isinstance(value, float) else str(value)
        say(f"{name:32} {shown}")
