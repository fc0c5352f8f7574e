"""Requests of a file to a server, and what came of them: a line a request, and a summary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.tools.client import FAILED, Endpoint
from kimi_k2.bench.tools.criteria import Outcome, judge, restored, stored, summarize
from kimi_k2.checkpoint.writer import write_json
from kimi_k2.files import read_text, replace_file
from kimi_k2.limits import MEDIA_BYTES

OUTCOMES, SUMMARY = "outcomes.jsonl", "summary.json"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file.

    Raises:
        SweepError: it is missing, or a line is no object; naming the line.
    """
    try:
        lines = read_text(path, MEDIA_BYTES, SweepError).splitlines()
    except FileNotFoundError as error:
        raise SweepError(f"cannot be read: {error}", file=path) from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise SweepError(f"line {number}: no JSON: {error}", file=path) from None
        if not isinstance(fields, dict):
            raise SweepError(f"line {number}: expected an object, got {type(fields).__name__}", file=path)
        found.append(fields)
    return found


def read_outcomes(path: Path) -> list[Outcome]:
    """Outcomes that an earlier run (or the Verifier) wrote.

    Raises:
        SweepError: see `read_lines`; a line without an index.
    """
    try:
        return [restored(fields) for fields in read_lines(path)]
    except KeyError as error:
        raise SweepError(f"a line has no {error}", file=path) from None


async def ask(endpoint: Endpoint, model: str, index: int, request: dict[str, Any]) -> Outcome:
    """One request, not streamed; what goes wrong is part of the outcome."""
    fields = {**request, "model": model, "stream": False}
    fields.pop("stream_options", None)
    try:
        status, text = await endpoint.chat(fields)
        if status != 200:
            return Outcome(index, error=f"{status}: {text[:300]}")
        return judge(index, request, json.loads(text))
    except (*FAILED, ValueError, LookupError, TypeError) as error:
        return Outcome(index, error=repr(error)[:300])


async def _verify(
    endpoint: Endpoint, requests: list[dict[str, Any]], concurrency: int, on_answer: Callable[[], None]
) -> list[Outcome]:
    free = asyncio.Semaphore(concurrency)
    try:
        model = await endpoint.model()

        async def one(index: int, request: dict[str, Any]) -> Outcome:
            async with free:
                outcome = await ask(endpoint, model, index, request)
            on_answer()
            return outcome

        return list(await asyncio.gather(*(one(index, request) for index, request in enumerate(requests, start=1))))
    finally:
        await endpoint.close()


def verify(
    endpoint: Endpoint,
    requests: Path,
    out: Path,
    *,
    reference: Path | None = None,
    concurrency: int = 8,
    on_answer: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Ask a server all requests of a JSONL file and write outcomes.jsonl and summary.json into `out`.

    Args:
        reference: outcomes of a trusted server for the same file.

    Returns:
        The summary, see `criteria.summarize`.

    Raises:
        SweepError: a file cannot be read, or the server does not answer as OpenAI's API does.
    """
    asked = read_lines(requests)
    trusted = None if reference is None else read_outcomes(reference)
    outcomes = asyncio.run(_verify(endpoint, asked, concurrency, on_answer))
    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / OUTCOMES, "".join(json.dumps(stored(one)) + "\n" for one in outcomes))
    summary = summarize(outcomes, trusted)
    write_json(out / SUMMARY, summary)
    return summary
