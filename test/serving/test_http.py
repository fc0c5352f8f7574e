"""The openai client against vLLM's server, and SGLang's, with our model and parsers: fields as OpenAI has them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import engines
import pytest
from scripted import write_scripted_checkpoint
from sglang_stand_ins import CALLED, environment_with_stand_ins

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
    engines.need(request.param)
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


def said(*messages: Any) -> tuple[str, str, str, list[tuple[str, str]]]:
    """Reasoning, content, arguments, ids and names of calls; of a whole message, or of a stream's changes together."""
    reasoning = [
        getattr(message, "reasoning", None) or getattr(message, "reasoning_content", None) or "" for message in messages
    ]
    calls = [call for message in messages for call in message.tool_calls or ()]
    named = [(call.id, call.function.name) for call in calls if call.function.name]
    arguments = "".join(call.function.arguments or "" for call in calls)
    return "".join(reasoning), "".join(message.content or "" for message in messages), arguments, named


def answers(client: Any, stream: bool, **options: Any) -> list[tuple[Any, str]]:
    """What each choice says, and why it ended."""
    answer = chat(client, stream=stream, **options)
    if not stream:
        return [(said(one.message), one.finish_reason) for one in sorted(answer.choices, key=lambda one: one.index)]
    found: list[Any] = [[] for _ in range(options.get("n", 1))]
    for chunk in answer:
        for choice in chunk.choices:
            found[choice.index].append(choice)
    assert {choice.finish_reason for choices in found for choice in choices[:-1]} <= {None}
    return [(said(*(choice.delta for choice in choices)), choices[-1].finish_reason) for choices in found]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls(either: Any, stream: bool) -> None:
    [((*texts, [(call_id, name)]), reason)] = answers(either, stream)
    assert (texts, name, reason) == (["Why", "So", "{}"], "run", "tool_calls")
    assert call_id


def test_counts_of_tokens(client: Any) -> None:
    """vLLM 0.24 does not count those of reasoning."""
    usage = chat(client).usage
    details = usage.completion_tokens_details
    assert usage.completion_tokens == TOKENS and (details is None or details.reasoning_tokens == 2)


def test_a_forced_call_is_after_the_reasoning(client: Any) -> None:
    """The grammar that forces a call begins where the reasoning ends."""
    reasoning, content, *_ = said(chat(client, tool_choice="required").choices[0].message)
    assert reasoning == "Why" and "So" not in content


CALLED_ONCE = ("{}", [("run:0", "run")])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "wanted", "reason"),
    [
        ({"tool_choice": "none"}, ("Why", "Sorun:0{}", "", []), "stop"),
        ({"max_tokens": 2}, ("W", "", "", []), "length"),
        ({"max_tokens": 3}, ("Why", "", "", []), "length"),
        ({"max_tokens": 6}, ("Why", "So", "", []), "length"),
        ({"stop": ["o"], "tools": None}, ("Why", "S", "", []), "stop"),
        ({"extra_body": {"include_reasoning": False}}, ("", "So", *CALLED_ONCE), "tool_calls"),
        ({"n": 3, "temperature": 1}, ("Why", "So", *CALLED_ONCE), "tool_calls"),
    ],
)
def test_what_is_asked(client: Any, stream: bool, options: dict[str, Any], wanted: Any, reason: str) -> None:
    """No markup reaches the client."""
    assert answers(client, stream, **options) == [(wanted, reason)] * options.get("n", 1)


def test_a_call_that_the_limit_cuts_off(client: Any) -> None:
    [((*texts, _), reason)] = answers(client, True, max_tokens=14)
    assert (texts, reason) == (["Why", "So", "{"], "length")
