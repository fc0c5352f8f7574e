"""K2-Vendor-Verifier's criteria of tool calls: how often they come when they should, and whether they fit their schema.

Of its README (MoonshotAI/K2-Vendor-Verifier): a request *triggers* if its finish_reason is `tool_calls`; precision,
recall and F1 of that are against a reference run of the same requests; schema accuracy is the share of the triggering
answers all of whose calls are valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jsonschema import SchemaError, ValidationError, validate

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
    try:
        validate(arguments, schemas[name] or {"type": "object"})
    except ValidationError as error:
        return f"arguments do not fit the schema: {error.message[:200]}"
    except (SchemaError, RecursionError) as error:
        return f"the tool's schema cannot be used: {str(error)[:200]}"
    return None


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
    found = [problem(call, request.get("tools") or []) for call in calls]
    if choice["finish_reason"] == TRIGGER and not calls:
        found = ["finish_reason is tool_calls, and there are none"]
    return Outcome(index, choice["finish_reason"], tuple(text for text in found if text))


def summarize(outcomes: Sequence[Outcome], reference: Sequence[Outcome] | None = None) -> dict[str, Any]:
    """The counts and ratios, by the Verifier's names; None where a ratio has nothing to count.

    Args:
        reference: outcomes of the same requests from a server that is trusted; None leaves trigger figures out.
    """
    triggering = [outcome for outcome in outcomes if outcome.triggers]
    valid = [outcome for outcome in triggering if not outcome.problems]
    summary: dict[str, Any] = {
        "requests": len(outcomes),
        "failures": sum(outcome.error is not None for outcome in outcomes),
        "count_finish_reason_tool_calls": len(triggering),
        "count_successful_tool_call": len(valid),
        "schema_accuracy": len(valid) / len(triggering) if triggering else None,
    }
    if reference is None:
        return summary
    wanted = {outcome.index: outcome.triggers for outcome in reference if outcome.error is None}
    both = [(outcome.triggers, wanted[outcome.index]) for outcome in outcomes if outcome.index in wanted]
    hit = sum(ours and theirs for ours, theirs in both)
    extra, missed = sum(ours and not theirs for ours, theirs in both), sum(theirs and not ours for ours, theirs in both)
    precision = hit / (hit + extra) if hit + extra else None
    recall = hit / (hit + missed) if hit + missed else None
    f1 = 2 * precision * recall / (precision + recall) if precision and recall else None if not both else 0.0
    return {**summary, "compared": len(both), "TP": hit, "FP": extra, "FN": missed,
            "TN": len(both) - hit - extra - missed, "tool_call_precision": precision, "tool_call_recall": recall,
            "tool_call_f1": f1}  # fmt: skip


def stored(outcome: Outcome) -> dict[str, Any]:
    """As a line of a results file."""
    return {**asdict(outcome), "problems": list(outcome.problems)}


def restored(fields: Mapping[str, Any]) -> Outcome:
    """From a line of a results file; the Verifier's own lines do too.

    Raises:
        KeyError: it has no index.
    """
    index = fields["index"] if "index" in fields else fields["data_index"]
    return Outcome(index, fields.get("finish_reason"), tuple(fields.get("problems") or ()), fields.get("error"))
