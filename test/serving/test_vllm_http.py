"""The openai client against vLLM's server with our model and parsers in it: every field as OpenAI defines it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest

from kimi_k2.tokenization.lexer import SPELLINGS

needs.engine("vllm")

USER: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server whose model writes `scripted.SCRIPT`."""
    import openai
    from scripted import write_scripted_checkpoint
    from vllm_server import serving

    directory = tmp_path_factory.mktemp("served")
    write_scripted_checkpoint(directory / "model")
    with serving(directory / "model", directory / "log") as url:
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        log = (directory / "log").read_text()
    assert "kimi-k2: operations are ours" in log
    assert "Traceback" not in log


def chat(client: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        model="kimi", messages=USER, **{"max_tokens": 50, "temperature": 0, **options}
    )


def text_of(found: Any) -> tuple[str, str]:
    return found.reasoning, found.content


def counts_reasoning_tokens() -> bool:
    """Whether this version of vLLM does; 0.24 does not."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    protocols = (Path(found.origin).parent / "entrypoints").rglob("protocol.py")
    return any("completion_tokens_details" in file.read_text(encoding="utf-8") for file in protocols)


def test_chat(client: Any) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion"
    assert answer.model == "kimi"
    choice = answer.choices[0]
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "stop", "assistant")
    assert text_of(choice.message)[0] == "Why"
    assert answer.usage.prompt_tokens + answer.usage.completion_tokens == answer.usage.total_tokens
    details = answer.usage.completion_tokens_details
    assert (details and details.reasoning_tokens) == (2 if counts_reasoning_tokens() else None)


def test_tool_calls(client: Any) -> None:
    choice = chat(client, tools=TOOLS).choices[0]
    assert text_of(choice.message) == ("Why", "So")
    call = choice.message.tool_calls[0]
    assert (call.type, call.id, call.function.name, call.function.arguments) == ("function", "run:0", "run", "{}")
    assert (len(choice.message.tool_calls), choice.finish_reason) == (1, "tool_calls")


def test_tool_calls_as_a_stream(client: Any) -> None:
    chunks = list(chat(client, tools=TOOLS, stream=True, stream_options={"include_usage": True}))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 18
    deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "Why"
    assert "".join(delta.content or "" for delta in deltas) == "So"
    changes = [change for delta in deltas for change in delta.tool_calls or ()]
    assert [(change.index, change.id, change.type) for change in changes if change.id] == [(0, "run:0", "function")]
    assert "".join(change.function.arguments for change in changes) == "{}"
    reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_a_forced_call_is_after_the_reasoning(client: Any) -> None:
    """The grammar that forces a call begins where the reasoning ends."""
    message = chat(client, tools=TOOLS, tool_choice="required").choices[0].message
    assert message.reasoning == "Why"
    assert "So" not in (message.content or "")


def test_no_calls_wanted(client: Any) -> None:
    streamed = chat(client, tools=TOOLS, tool_choice="none", stream=True)
    content = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    choice = chat(client, tools=TOOLS, tool_choice="none").choices[0]
    assert content == choice.message.content == "Sorun:0{}"
    assert not choice.message.tool_calls
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize(("limit", "reasoning", "content"), [(2, "W", None), (3, "Why", None), (6, "Why", "So")])
def test_the_token_limit(client: Any, limit: int, reasoning: str, content: str | None) -> None:
    choice = chat(client, max_tokens=limit, tools=TOOLS).choices[0]
    assert (choice.message.reasoning, choice.message.content or None) == (reasoning, content)
    assert choice.finish_reason == "length"


def test_a_call_that_the_limit_cuts_off(client: Any) -> None:
    chunks = list(chat(client, max_tokens=14, tools=TOOLS, stream=True))
    changes = [change for chunk in chunks for change in chunk.choices[0].delta.tool_calls or ()]
    assert [change.function.name for change in changes if change.id] == ["run"]
    assert "".join(change.function.arguments for change in changes) == "{"
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(client: Any, stream: bool) -> None:
    found = chat(client, stop=["o"], stream=stream)
    if stream:
        chunks = list(found)
        content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        content, reason = found.choices[0].message.content, found.choices[0].finish_reason
    assert (content, reason) == ("S", "stop")


def test_logprobs(client: Any) -> None:
    choice = chat(client, tools=TOOLS, logprobs=True, top_logprobs=2).choices[0]
    entries = choice.logprobs.content
    assert len(entries) == 18
    for entry in entries:
        assert bytes(entry.bytes).decode() == entry.token
        assert -1e-3 < entry.logprob <= 0  # the script is all but certain
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert math.exp(entry.top_logprobs[0].logprob) + math.exp(entry.top_logprobs[1].logprob) <= 1 + 1e-6


def test_several_choices(client: Any) -> None:
    answer = chat(client, n=3, tools=TOOLS, temperature=1)
    assert sorted(choice.index for choice in answer.choices) == [0, 1, 2]
    for choice in answer.choices:
        assert text_of(choice.message) == ("Why", "So")
        assert len(choice.message.tool_calls) == 1


def test_reasoning_left_out(client: Any) -> None:
    choice = chat(client, extra_body={"include_reasoning": False}, tools=TOOLS).choices[0]
    assert (choice.message.reasoning, choice.message.content) == (None, "So")


def test_no_markup_reaches_the_client(client: Any) -> None:
    for options in ({}, {"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}):
        message = chat(client, **options).choices[0].message
        assert not any(marker in f"{message.reasoning}{message.content}" for marker in SPELLINGS)


def test_errors_are_openais(client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=USER)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="kimi", messages=[{"role": "user", "content": "a b " * 4000}])
    assert chat(client).choices[0].finish_reason == "stop"


def test_completions(client: Any) -> None:
    answer = client.completions.create(model="kimi", prompt="<|im_middle|>", max_tokens=3, temperature=0, logprobs=1)
    assert answer.object == "text_completion"
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.token_logprobs) == 3


def test_a_models_list(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["kimi"]
    assert Path(client.models.list().data[0].root).name == "model"
