"""Cells of concurrency, input and output length against a server, and what `vllm bench serve` says of each."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kimi_k2.bench.endpoint.client import Answer, Endpoint, at_once
from kimi_k2.bench.environment import capture
from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.results import percentile
from kimi_k2.bench.sweep import Settings, draw_prompts
from kimi_k2.checkpoint.writer import write_json
from kimi_k2.files import read_json

SCHEMA = "kimi-k2/serving/1"
METRICS = ("ttft", "tpot", "itl", "e2el")
Say = Callable[[str], None]


@dataclass(frozen=True)
class Load:
    """What is asked of the server.

    Attributes:
        settings: the sweep's; a batch size is a concurrency here, and a cell makes `runs` requests for each of it.
        vocab_size: prompts are drawn below it.
    """

    settings: Settings
    vocab_size: int


def summarize(answers: Sequence[Answer], duration: float) -> dict[str, Any]:
    """Mean, median and P99 in seconds of TTFT, TPOT, ITL and E2EL, and throughput, as `vllm bench serve` defines them.

    TPOT is of a request (its tokens after the first over the time after the first), ITL of a gap between chunks.
    """
    values = {
        "ttft": [answer.ttft for answer in answers],
        "tpot": [answer.tpot for answer in answers if answer.tpot is not None],
        "itl": [gap for answer in answers for gap in answer.itl],
        "e2el": [answer.latency for answer in answers],
    }
    summary: dict[str, Any] = {
        name: {"mean": math.fsum(found) / len(found), "median": percentile(found, 50), "p99": percentile(found, 99)}
        for name, found in values.items()
        if found
    }
    made, read = sum(answer.output_tokens for answer in answers), sum(answer.prompt_tokens for answer in answers)
    summary["request_throughput"] = len(answers) / duration
    summary["output_throughput"] = made / duration
    summary["total_token_throughput"] = (made + read) / duration
    return summary


async def _cell(endpoint: Endpoint, model: str, load: Load, cell: dict[str, int]) -> dict[str, Any]:
    concurrency, length, new = cell["batch_size"], cell["prompt_length"], cell["output_length"]
    count = concurrency * (load.settings.runs + load.settings.warmup)
    prompts = draw_prompts(load.settings, load.vocab_size, count, length)
    warm = concurrency * load.settings.warmup
    if warm:
        await at_once(endpoint, model, prompts[:warm], new, concurrency)
    answers, duration = await at_once(endpoint, model, prompts[warm:], new, concurrency)
    return {"duration": duration, "requests": [asdict(answer) for answer in answers],
            "summary": summarize(answers, duration)}  # fmt: skip


async def _run(endpoint: Endpoint, load: Load, path: Path, say: Say) -> dict[str, Any]:
    try:
        model = await endpoint.model()
        results = _open(path, {**_plain(asdict(load.settings)), "served": model, "vocab_size": load.vocab_size})
        cells = load.settings.cells()
        for number, cell in enumerate(cells, start=1):
            shape = _shape(cell)
            name = ", ".join(f"{key} {value}" for key, value in shape.items())
            kept = [done for done in results["cells"] if _only(done) == shape and done["status"] == "ok"]
            if kept:
                say(f"[{number}/{len(cells)}] {name}: kept")
                continue
            try:
                measured = {**shape, "status": "ok", **await _cell(endpoint, model, load, cell)}
            except SweepError as error:
                measured = {**shape, "status": "failed", "error": str(error)}
            results["cells"] = [done for done in results["cells"] if _only(done) != shape] + [measured]
            results["cells"].sort(key=lambda done: [_shape(one) for one in cells].index(_only(done)))
            write_json(path, results)
            say(f"[{number}/{len(cells)}] {name}: {_brief(measured)}")
    finally:
        await endpoint.close()
    return results


def run_load(endpoint: Endpoint, load: Load, path: Path, say: Say = lambda _: None) -> dict[str, Any]:
    """Run what `path` does not hold yet; the file is whole after every cell.

    A cell that fails is recorded with its error and tried again next time.

    Raises:
        SweepError: the server cannot be asked; `path` holds another load.
    """
    return asyncio.run(_run(endpoint, load, path, say))


def _open(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    fresh = {"schema": SCHEMA, "settings": settings, "environment": capture({}), "cells": []}
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return fresh
    try:
        stored = read_json(path, SweepError)
        same = stored["schema"] == SCHEMA and stored["settings"] == settings
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SweepError(f"cannot be read: {error!r}", file=path) from None
    if not same:
        raise SweepError("holds another load; remove the file or give another --out", file=path)
    result: dict[str, Any] = stored
    return result


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _shape(cell: dict[str, int]) -> dict[str, int]:
    return {"input": cell["prompt_length"], "concurrency": cell["batch_size"], "output": cell["output_length"]}


def _only(done: dict[str, Any]) -> dict[str, int]:
    return {name: done[name] for name in ("input", "concurrency", "output")}


def _brief(cell: dict[str, Any]) -> str:
    if cell["status"] != "ok":
        return f"failed: {cell['error']}"
    summary = cell["summary"]
    tpot = summary.get("tpot", {}).get("median", 0.0)
    return f"TTFT {summary['ttft']['median'] * 1e3:.1f} ms, TPOT {tpot * 1e3:.2f} ms"
