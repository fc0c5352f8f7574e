"""The openai client against vLLM's server, and SGLang's, with our model and parsers: fields as OpenAI has them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
from scripted import write_scripted_checkpoint
from sglang_stand_ins import CALLED, environment_with_stand_ins

from kimi_k2.tokenization.lexer import SPELLINGS

openai = pytest.importorskip("openai")
USER: Any = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]
TOKENS = 18  # of `scripted.SCRIPT`, which the servers' model writes


def serving(engine: str, directory: Path) -> Any:
    if engine == "vllm":
        return engines.serving(directory / "model", directory / "log")
    port = engines.free_port()
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(directory / "model"), "--device", "cpu",
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "kimi", "--dtype", "bfloat16",
        "--max-total-tokens", "4096", "--context-length", "2048", "--skip-server-warmup",
        "--tool-call-parser", "kimi_k2_stream", "--reasoning-parser", "kimi_k2",
    ]  # fmt: skip
    environment = environment_with_stand_ins(directory / "stand_ins")
    return engines.started(command, f"http://127.0.0.1:{port}", "/health_generate", directory / "log", environment)


@pytest.fixture(scope="module", params=["vllm", "sglang"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"needs {request.param} (docs/engines.md): not importable here: {request.param}")
    directory = tmp_path_factory.mktemp("served")
    write_scripted_checkpoint(directory / "model")
    with serving(request.param, directory) as url:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        log = (directory / "log").read_text()
    assert engines.OURS in log and CALLED not in log
    assert request.param == "sglang" or "Traceback" not in log


@pytest.fixture
def client(request: pytest.FixtureRequest, either: Any) -> Any:
    """vLLM's alone."""
    if "sglang" in request.node.callspec.id:
        pytest.skip("of vLLM's server")
    return either


def chat(client: Any, **options: Any) -> Any:
    given = {"model": "kimi", "messages": USER, "max_tokens": 50, "temperature": 0, "tools": TOOLS, **options}
    return client.chat.completions.create(**given)


def said(message: Any) -> tuple[str, str, str]:
    """Reasoning, content, and arguments of calls, each of one name or none."""
    reasoning = getattr(message, "reasoning", None) or getattr(message, "reasoning_content", None) or ""
    calls = message.tool_calls or ()
    return reasoning, message.content or "", "".join(call.function.arguments or "" for call in calls)


def together(chunks: list[Any]) -> tuple[tuple[str, ...], str]:
    """What a stream says, and why it ended."""
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert {choice.finish_reason for choice in choices[:-1]} <= {None}
    return tuple(map("".join, zip(*(said(choice.delta) for choice in choices), strict=True))), choices[-1].finish_reason


def test_tool_calls(either: Any) -> None:
    choice = chat(either).choices[0]
    assert (said(choice.message), choice.finish_reason) == (("Why", "So", "{}"), "tool_calls")
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "run") and call.id


def test_tool_calls_as_a_stream(either: Any) -> None:
    chunks = list(chat(either, stream=True))
    assert together(chunks) == (("Why", "So", "{}"), "tool_calls")
    changes = [change for chunk in chunks for change in chunk.choices[0].delta.tool_calls or ()]
    assert [(change.index, change.function.name) for change in changes if change.function.name] == [(0, "run")]


def test_ids_of_calls_and_counts_of_tokens(client: Any) -> None:
    """vLLM 0.24 does not count those of reasoning."""
    answer, chunks = chat(client), list(chat(client, stream=True))
    changes = [change for chunk in chunks for change in chunk.choices[0].delta.tool_calls or ()]
    assert [call.id for call in answer.choices[0].message.tool_calls] == ["run:0"]
    assert [change.id for change in changes if change.id] == ["run:0"]
    details = answer.usage.completion_tokens_details
    assert answer.usage.completion_tokens == TOKENS and (details is None or details.reasoning_tokens == 2)


def test_a_forced_call_is_after_the_reasoning(client: Any) -> None:
    """The grammar that forces a call begins where the reasoning ends."""
    reasoning, content, _ = said(chat(client, tool_choice="required").choices[0].message)
    assert reasoning == "Why" and "So" not in content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "wanted", "reason"),
    [
        ({"tool_choice": "none"}, ("Why", "Sorun:0{}", ""), "stop"),
        ({"max_tokens": 2}, ("W", "", ""), "length"),
        ({"max_tokens": 3}, ("Why", "", ""), "length"),
        ({"max_tokens": 6}, ("Why", "So", ""), "length"),
        ({"stop": ["o"], "tools": None}, ("Why", "S", ""), "stop"),
        ({"extra_body": {"include_reasoning": False}}, ("", "So", "{}"), "tool_calls"),
        ({"n": 3, "temperature": 1}, ("Why", "So", "{}"), "tool_calls"),
    ],
)
def test_what_is_asked(client: Any, stream: bool, options: dict[str, Any], wanted: Any, reason: str) -> None:
    """No markup reaches the client."""
    if not stream:
        choices = chat(client, **options).choices
        assert sorted(choice.index for choice in choices) == list(range(options.get("n", 1)))
        assert {(said(one.message), one.finish_reason) for one in choices} == {(wanted, reason)}
        assert not any(marker in "".join(said(choices[0].message)) for marker in SPELLINGS)
        return
    chunks = list(chat(client, stream=True, **options))
    for index in range(options.get("n", 1)):
        assert together([chunk for chunk in chunks if chunk.choices[0].index == index]) == (wanted, reason)


def test_a_call_that_the_limit_cuts_off(client: Any) -> None:
    chunks = list(chat(client, max_tokens=14, stream=True))
    assert together(chunks) == (("Why", "So", "{"), "length")
