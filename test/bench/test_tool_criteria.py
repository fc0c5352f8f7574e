"""`bench tools`, by K2-Vendor-Verifier's criteria: validity against jsonschema, F1 against one computed by sets."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import kimi

from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.tools import OUTCOMES, Endpoint, Outcome, judge, problem, read_outcomes, summarize, verify
from kimi_k2.files import Json

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
          "required": ["city"], "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
         {"type": "function", "function": {"name": "now"}}]  # fmt: skip


def call(name: str, arguments: str) -> Json:
    return {"id": "x", "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(("name", "arguments", "wrong"), [
    ("weather", '{"city": "Oslo"}', None), ("weather", '{"city": "Oslo", "days": 2}', None), ("now", "{}", None),
    ("weather", '{"days": 2}', "'city' is a required property"), ("weather", '{"city": 2}', "not of type"),
    ("weather", '{"city": "Oslo", "x": 1}', "Additional properties"), ("weather", '{"city": "Os', "no JSON"),
    ("weather", "", "no JSON"), ("now", "[]", "not of type"), ("news", "{}", "no tool is called 'news'"),
])  # fmt: skip
def test_problems(name: str, arguments: str, wrong: str | None) -> None:
    found = problem(call(name, arguments), TOOLS)
    assert found is None if wrong is None else wrong in str(found)


def answer(reason: str, *calls: Json) -> Json:
    return {"choices": [{"finish_reason": reason, "message": {"content": None, "tool_calls": list(calls)}}]}


def test_an_answer_is_valid_if_all_its_calls_are() -> None:
    good, bad = call("now", "{}"), call("weather", "{}")
    request = {"tools": TOOLS}
    assert judge(1, request, answer("tool_calls", good, good)).problems == ()
    assert len(judge(1, request, answer("tool_calls", good, bad, bad)).problems) == 2
    assert judge(1, request, answer("tool_calls")).problems
    assert not judge(1, request, answer("stop")).triggers


def test_f1_is_that_of_sets() -> None:
    draw = random.Random(0)
    ours = [Outcome(i, draw.choice(["tool_calls", "stop", "length"])) for i in range(200)]
    theirs = [Outcome(i, draw.choice(["tool_calls", "stop"])) for i in range(200)]
    found = summarize(ours, theirs)
    mine, wanted = {o.index for o in ours if o.triggers}, {o.index for o in theirs if o.triggers}
    assert (found["TP"], found["FP"], found["FN"]) == (len(mine & wanted), len(mine - wanted), len(wanted - mine))
    assert found["TN"] == 200 - len(mine | wanted)
    assert found["tool_call_f1"] == pytest.approx(2 * len(mine & wanted) / (len(mine) + len(wanted)))


def test_nothing_to_count() -> None:
    assert summarize([Outcome(1, "stop")])["schema_accuracy"] is None
    assert summarize([Outcome(1, "tool_calls")], [Outcome(1, "stop")])["tool_call_f1"] == 0.0
    assert summarize([Outcome(1, "stop")], [])["tool_call_f1"] is None
    found = summarize([Outcome(1, error="500"), Outcome(2, "tool_calls", ("bad",))], [Outcome(2, "tool_calls")])
    assert (found["failures"], found["schema_accuracy"], found["tool_call_f1"]) == (1, 0.0, 1.0)


# Answers that are not OpenAI's.
ODD = {
    "deep": "%s", "list": '{"choices": [{"finish_reason": "stop", "message": {"tool_calls": ["%.1s"]}}]}',
    "none": '{"choices": ["%.1s"]}', "text": "%.1s<html>",
}  # fmt: skip


def server(path: str, _: str | None, fields: Any) -> tuple[int, str]:
    """Calls the tool that the user names, with the arguments that the user gives."""
    if path == "/v1/models":
        return 200, json.dumps({"data": [{"id": "served"}]})
    assert (path, fields["model"], fields["stream"]) == ("/v1/chat/completions", "served", False)
    text = fields["messages"][-1]["content"]
    if text == "fail":
        return 500, "broken"
    if text in ODD:
        return 200, ODD[text] % ("[" * 100_000)
    name, _, arguments = text.partition(" ")
    return 200, json.dumps(answer("tool_calls", call(name, arguments)) if arguments else answer("stop"))


def requests_file(path: Path, *texts: str) -> Path:
    lines = [{"messages": [{"role": "user", "content": text}], "tools": TOOLS, "stream": True} for text in texts]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_run_against_a_reference(serve: Callable[..., str], tmp_path: Path) -> None:
    texts = ("now {}", "weather {}", "hello", "fail", 'weather {"city": "A"}', *ODD)
    asked = requests_file(tmp_path / "asked.jsonl", *texts)
    endpoint = Endpoint(serve(server))
    first = verify(endpoint, asked, tmp_path / "first")
    assert first == {"requests": 9, "failures": 5, "count_finish_reason_tool_calls": 3,
                     "count_successful_tool_call": 2, "schema_accuracy": pytest.approx(2 / 3)}  # fmt: skip
    outcomes = read_outcomes(tmp_path / "first" / OUTCOMES)
    assert [outcome.index for outcome in outcomes] == list(range(1, 10)) and outcomes[3].error == "500: broken"
    endpoint = Endpoint(serve(server))
    again = verify(endpoint, asked, tmp_path / "second", reference=tmp_path / "first" / OUTCOMES)
    assert (again["compared"], again["tool_call_f1"]) == (4, 1.0)


def test_no_openai_server(serve: Callable[..., str], tmp_path: Path) -> None:
    asked = requests_file(tmp_path / "asked.jsonl", "hello")
    nameless = serve(lambda *_: (200, '{"data": [{"id": null}]}'))
    for url in (serve(lambda *_: (200, "<html>")), nameless, "http://127.0.0.1:9"):
        refused = kimi("bench", "tools", url, asked, "--out", tmp_path / "out", status=1).exception
        assert isinstance(refused, SweepError) and "expected OpenAI's list of models" in str(refused)


def test_the_url_and_the_key(serve: Callable[..., str]) -> None:
    url = serve(lambda path, key, fields: (200, json.dumps({"data": [{"id": f"{path} {key}"}]})))
    for form in (url, f"{url}/", f"{url}/v1", f"{url}/v1/"):
        assert Endpoint(form).model() == "/v1/models None"
    assert Endpoint(url, "key").model() == "/v1/models Bearer key"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    wrong = {
        "{}\n[1]\n": "line 2: expected an object",
        "{\n": "line 1: no JSON",
        "[" * 9999: "nested",
        "\n": "got none",
    }
    for text, told in wrong.items():
        path.write_text(text)
        with pytest.raises(SweepError, match=told):
            verify(Endpoint("http://server"), path, tmp_path / "out")
    for text in ('{"finish_reason": "stop"}', '{"index": [1]}'):
        path.write_text(text)
        with pytest.raises(SweepError, match="index: expected an integer"):
            read_outcomes(path)


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_asked(tmp_path: Path) -> None:
    asked = requests_file(tmp_path / "asked.jsonl", "hello")
    with pytest.raises(OSError, match="/proc/out"):
        verify(Endpoint("http://127.0.0.1:9"), asked, Path("/proc/out"))
