"""The openai client against SGLang's server with our model and our parser of tool calls in it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import needs
import pytest
from sglang_stand_ins import CALLED, environment_with_stand_ins

needs.engine("sglang")

USER: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server whose model writes `scripted.SCRIPT`."""
    import openai
    from scripted import write_scripted_checkpoint
    from vllm_server import free_port, wait_for

    directory, port = tmp_path_factory.mktemp("served"), free_port()
    write_scripted_checkpoint(directory / "model")
    log = directory / "log"
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(directory / "model"), "--device", "cpu",
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "kimi", "--dtype", "bfloat16",
        "--max-total-tokens", "4096", "--context-length", "2048", "--skip-server-warmup",
        "--tool-call-parser", "kimi_k2_stream", "--reasoning-parser", "kimi_k2",
    ]  # fmt: skip
    environment = environment_with_stand_ins(directory / "stand_ins")
    with log.open("w") as written:
        server = subprocess.Popen(command, stdout=written, stderr=written, env=environment, start_new_session=True)
    try:
        wait_for(server, f"http://127.0.0.1:{port}/health_generate", log)
        assert "operations are ours" in log.read_text()
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
        assert CALLED not in log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)


def chat(client: Any, **options: Any) -> Any:
    given = {"model": "kimi", "messages": USER, "max_tokens": 50, "temperature": 0, "tools": TOOLS, **options}
    return client.chat.completions.create(**given)


def test_tool_call(client: Any) -> None:
    choice = chat(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "Why"
    assert choice.message.content == "So"
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "run", "{}")
    assert call.id


def test_streamed_tool_call(client: Any) -> None:
    reasoning = content = arguments = ""
    starts, finished = [], []
    for chunk in chat(client, stream=True):
        choice = chunk.choices[0]
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or ():
            starts += [(call.index, call.function.name)] if call.function.name else []
            arguments += call.function.arguments or ""
        finished += [choice.finish_reason] if choice.finish_reason else []
    assert (reasoning, content, arguments) == ("Why", "So", "{}")
    assert starts == [(0, "run")]
    assert finished == ["tool_calls"]
