"""Requests of a file to a server, and what came of them: a line a request, and a summary.

By K2-Vendor-Verifier's criteria of tool calls: how often they come when they should, and whether they fit their schema.

Of its README (MoonshotAI/K2-Vendor-Verifier): a request *triggers* if its finish_reason is `tool_calls`; precision,
recall and F1 of that are against a reference run of the same requests; schema accuracy is the share of the triggering
answers all of whose calls are valid.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from http.client import HTTPException
from itertools import count
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from kimi_k2.bench.errors import SweepError
from kimi_k2.checkpoint.writer import write_json
from kimi_k2.files import Json, make_output, parse_json, read_text, replace_file
from kimi_k2.limits import MEDIA_BYTES
from kimi_k2.tokenization.tool_resolver import schema_problem

FAILED = (OSError, HTTPException)  # no answer, or one that breaks off


@dataclass(frozen=True)
class Endpoint:
    """A server under `url`, which ends in /v1 (it is added if missing).

    Attributes:
        api_key: sent as a bearer token; None for none.
    """

    url: str
    api_key: str | None = None

    def ask(self, path: str, fields: Mapping[str, Any] | None = None, timeout: float | None = None) -> tuple[int, str]:
        """Status and text of the answer to a request, which posts `fields` if there are any.

        Raises:
            OSError, HTTPException: there is none, after `timeout` seconds too.
        """
        body = None if fields is None else json.dumps(fields).encode()
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = Request(f"{self.url.rstrip('/').removesuffix('/v1')}/v1/{path}", body, headers)
        try:
            with urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode(errors="replace")
        except HTTPError as error:
            return error.code, error.read().decode(errors="replace")

    def model(self) -> str:
        """The name of the first model that the server lists.

        Raises:
            SweepError: it does not answer as OpenAI's API does.
        """
        try:
            name = json.loads(self.ask("models", timeout=30)[1])["data"][0]["id"]
            if not isinstance(name, str):
                raise TypeError(f"its id is {name!r}")
            return name
        except (*FAILED, ValueError, LookupError, TypeError) as error:
            raise SweepError(f"{self.url}/models: expected OpenAI's list of models: {error!r}") from None


TRIGGER = "tool_calls"


def problem(call: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]) -> str | None:
    """What is wrong with a call of OpenAI's form, in a few words; None if it fits one of the request's tools."""
    function = call.get("function") or {}
    name = function.get("name")
    schemas = {
        tool["function"]["name"]: tool["function"].get("parameters") for tool in tools if tool.get("type") == "function"
    }
    if name not in schemas:
        return f"no tool is called {name!r}"
    try:
        arguments = json.loads(function.get("arguments") or "")
    except (ValueError, TypeError, RecursionError) as error:
        return f"arguments are no JSON: {error}"
    return schema_problem(arguments, schemas[name])


@dataclass(frozen=True)
class Outcome:
    """What came of one request.

    Attributes:
        index: of the request in its file, from 1.
        finish_reason: OpenAI's; None if the request failed.
        problems: of its calls, one text each for those that have one.
        error: why the request failed.
    """

    index: int
    finish_reason: str | None = None
    problems: tuple[str, ...] = ()
    error: str | None = None

    @property
    def triggers(self) -> bool:
        """Whether the answer calls tools."""
        return self.finish_reason == TRIGGER


def judge(index: int, request: Mapping[str, Any], answer: Mapping[str, Any]) -> Outcome:
    """The outcome of a request from its chat completion."""
    choice = answer["choices"][0]
    calls = choice["message"].get("tool_calls") or []
    problems = [problem(call, request.get("tools") or []) for call in calls]
    if choice["finish_reason"] == TRIGGER and not calls:
        problems = ["finish_reason is tool_calls, and there are none"]
    return Outcome(index, choice["finish_reason"], tuple(text for text in problems if text))


def summarize(outcomes: Sequence[Outcome], reference: Sequence[Outcome] | None = None) -> Json:
    """The counts and ratios, by the Verifier's names; None where a ratio has nothing to count.

    Args:
        reference: outcomes of the same requests from a server that is trusted; None leaves trigger figures out.
    """
    triggering = [outcome for outcome in outcomes if outcome.triggers]
    valid = [outcome for outcome in triggering if not outcome.problems]
    summary: Json = {
        "requests": len(outcomes),
        "failures": sum(outcome.error is not None for outcome in outcomes),
        "count_finish_reason_tool_calls": len(triggering),
        "count_successful_tool_call": len(valid),
        "schema_accuracy": len(valid) / len(triggering) if triggering else None,
    }
    if reference is None:
        return summary
    wanted = {outcome.index: outcome.triggers for outcome in reference if outcome.error is None}
    both = Counter((outcome.triggers, wanted[outcome.index]) for outcome in outcomes if outcome.index in wanted)
    pairs = {"TP": (True, True), "FP": (True, False), "FN": (False, True), "TN": (False, False)}
    counts = {name: both[pair] for name, pair in pairs.items()}
    hit, extra, missed, _ = counts.values()
    return {
        **summary,
        "compared": both.total(),
        **counts,
        "tool_call_precision": hit / (hit + extra) if hit + extra else None,
        "tool_call_recall": hit / (hit + missed) if hit + missed else None,
        "tool_call_f1": 2 * hit / (2 * hit + extra + missed) if hit else 0.0 if both else None,
    }


OUTCOMES, SUMMARY = "outcomes.jsonl", "summary.json"


def read_lines(path: Path) -> list[Json]:
    """The objects of a JSONL file.

    Raises:
        SweepError: it is missing or empty, or a line is no object; naming the line.
    """
    try:
        lines = read_text(path, MEDIA_BYTES, SweepError).splitlines()
    except FileNotFoundError as error:
        raise SweepError(f"cannot be read: {error}", file=path) from None
    objects = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            fields = parse_json(line.encode())
        except ValueError as error:
            raise SweepError(f"line {number}: no JSON: {error}", file=path) from None
        if not isinstance(fields, dict):
            raise SweepError(f"line {number}: expected an object, got {type(fields).__name__}", file=path)
        objects.append(fields)
    if not objects:
        raise SweepError("expected an object a line, got none", file=path)
    return objects


def read_outcomes(path: Path) -> list[Outcome]:
    """Outcomes that an earlier run, or the Verifier itself, wrote; without the problems of their calls.

    Raises:
        SweepError: see `read_lines`; a line without an integer `index`.
    """
    outcomes = []
    for fields in read_lines(path):
        index = fields.get("index", fields.get("data_index"))
        if not isinstance(index, int):
            raise SweepError(f"index: expected an integer in each line, got {index!r:.100}", file=path)
        outcomes.append(Outcome(index, fields.get("finish_reason"), error=fields.get("error")))
    return outcomes


def ask(endpoint: Endpoint, model: str, index: int, request: Json) -> Outcome:
    """One request, not streamed; what goes wrong is part of the outcome."""
    fields = {**request, "model": model, "stream": False}
    fields.pop("stream_options", None)
    try:
        status, text = endpoint.ask("chat/completions", fields)
        if status != 200:
            return Outcome(index, error=f"{status}: {text[:300]}")
        return judge(index, request, json.loads(text))
    except (*FAILED, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return Outcome(index, error=repr(error)[:300])


def verify(
    endpoint: Endpoint, requests: Path, out: Path, *, reference: Path | None = None, concurrency: int = 8
) -> Json:
    """Ask a server all requests of a JSONL file and write outcomes.jsonl and summary.json into `out`.

    Args:
        reference: outcomes of a trusted server for the same file.

    Returns:
        The summary, see `summarize`.

    Raises:
        SweepError: a file cannot be read, or the server does not answer as OpenAI's API does.
        OSError: `out` cannot be written; before anything is asked.
    """
    asked = read_lines(requests)
    trusted = None if reference is None else read_outcomes(reference)
    make_output(out)
    with ThreadPoolExecutor(concurrency) as pool:
        outcomes = list(pool.map(partial(ask, endpoint, endpoint.model()), count(1), asked))
    replace_file(out / OUTCOMES, "".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes))
    summary = summarize(outcomes, trusted)
    write_json(out / SUMMARY, summary)
    return summary
