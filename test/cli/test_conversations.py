"""`generate` with conversations, tools, stop strings and JSON, and `chat`: what a scripted model's words become."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from command import kimi

from kimi_k2.engine.generate import Generator
from kimi_k2.engine.sampler import Step
from kimi_k2.errors import GenerationError, KimiK2Error, TokenizerError
from kimi_k2.tokenization.template import ChatTemplate
from kimi_k2.tokenization.tokenizer import KimiTokenizer

CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city":"Bern"}<|tool_call_end|><|tool_calls_section_end|>'
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]

Script = Callable[..., list[str]]


@pytest.fixture
def script(k25_int4: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """`script(text, ...)` makes the model say these texts, a generation after another; returns the prompts it saw."""
    tokenizer = KimiTokenizer.from_pretrained(k25_int4)
    end = tokenizer.special_tokens["<|im_end|>"]
    seen: list[str] = []

    def install(*texts: str, ends: bool = True) -> list[str]:
        left = list(texts)

        def stream(self: Generator, prompts: Sequence[Sequence[int]], params: Any, **_: Any) -> Iterator[Step]:
            if not left:
                raise GenerationError("the script has ended")
            seen.extend(tokenizer.decode(prompt) for prompt in prompts)
            rows = [tokenizer.encode(left.pop(0), allow_special=True) + ([end] if ends else []) for _ in prompts]
            for step in range(max(map(len, rows))):
                yield Step(tuple(row[step] if step < len(row) else None for row in rows), 0.001)

        monkeypatch.setattr(Generator, "stream", stream)
        return seen

    return install


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A conversation and tools."""
    conversation = [{"role": "system", "content": "OLD"}, {"role": "user", "content": "Weather?"}]
    for name, content in (("messages", conversation), ("tools", TOOLS)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return {name: str(tmp_path / f"{name}.json") for name in ("messages", "tools")}


def test_json_has_reasoning_and_tool_calls_apart(k25_int4: Path, script: Script, files: dict[str, str]) -> None:
    prompts = script("Look it up.</think>One moment." + CALL)
    options = ["--messages", files["messages"], "--tools", files["tools"], "--system", "NEW", "--json"]
    result = kimi("generate", k25_int4, *options)
    line = json.loads(result.stdout)
    assert line["message"] == {
        "role": "assistant",
        "content": "One moment.",
        "reasoning_content": "Look it up.",
        "tool_calls": [
            {
                "id": "functions.weather:0",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Bern"}'},
            }
        ],
    }
    assert line["finish_reason"] == "tool_calls"
    assert line["usage"]["prompt_tokens"] > 10
    assert "NEW" in prompts[0]
    assert "OLD" not in prompts[0]
    assert "weather" in prompts[0]
    assert prompts[0].endswith("<think>")


def test_a_line_of_json_when_a_reply_ends(k25_int4: Path, script: Script) -> None:
    script("a</think>first one", "b</think>second")
    shown = kimi("generate", k25_int4, "-p", "x", "-p", "y", "--json", status=None)
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert [line["index"] for line in lines] == [1, 0], "the second ends first"
    assert [line["message"]["content"] for line in lines] == ["second", "first one"]
    assert [line["message"]["reasoning_content"] for line in lines] == ["b", "a"]


def test_stop_strings_end_each_reply(k25_int4: Path, script: Script) -> None:
    script("one END two", "ENDless", ends=False)
    options = ["--raw", "-p", "x", "-p", "y", "--stop", "END"]
    result = kimi("generate", k25_int4, *options, status=None)
    assert result.stdout == "--- 0\none \n--- 1\n\n"


def test_no_thinking_closes_it_in_the_prompt(k25_int4: Path, script: Script) -> None:
    prompts = script("Hello")
    kimi("generate", k25_int4, "-p", "x", "--no-thinking")
    assert prompts[0].endswith("<think></think>")


def test_what_a_template_does_not_heed_is_refused(checkpoints: dict[str, Path]) -> None:
    user = [{"role": "user", "content": "x"}]
    instruct, thinking, k25 = (KimiTokenizer.from_pretrained(checkpoints[name]) for name in ("fp8", "thinking", "k2.5"))
    assert instruct.render_segments(user, thinking=False) == instruct.render_segments(user)
    with pytest.raises(TokenizerError, match="thinking: a checkpoint of the style 'thinking'"):
        thinking.render_segments(user, thinking=False)
    k25.chat_template = ChatTemplate("{{ messages[0].content }}<think>", k25.special_tokens)  # reads neither
    for tokenizer, options in (
        (instruct, {"preserve_thinking": True}),
        (k25, {"thinking": False, "preserve_thinking": True}),
    ):
        for name, value in options.items():
            with pytest.raises(TokenizerError, match=f"^{name}"):
                tokenizer.render_segments(user, **{name: value})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[", "no valid JSON"),
        ("{}", "messages: expected a list"),
        ("[]", "messages: expected a list"),
        ("[3]", "messages[0]: expected an object"),
        ('[{"role": "king", "content": "x"}]', "'role'"),
        ("[" * 100_000, "nested more than"),
    ],
)
def test_bad_conversations_are_named(k25_int4: Path, tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "m.json").write_text(content)
    result = kimi("generate", k25_int4, "--messages", tmp_path / "m.json", status=None)
    assert isinstance(result.exception, KimiK2Error)
    assert says in str(result.exception)


def test_chat_asks_for_tool_results_and_saves(
    k25_int4: Path, script: Script, files: dict[str, str], tmp_path: Path
) -> None:
    prompts = script("Hm.</think>Hello.", CALL, "Done.</think>It rains.")
    saved = tmp_path / "saved.json"
    lines = ["/system Be kind.", "Hi", f"/tools {files['tools']}", "Weather\\", "please?", '{"sky": "rain"}']
    lines += [f"/save {saved}", "/nonsense", "/load /nowhere", "/quit"]
    result = kimi("chat", k25_int4, input="\n".join(lines) + "\n")
    for text in ("Hello.", "→ weather", "It rains.", "no command /nonsense", "/nowhere: cannot be read"):
        assert text in result.output
    content = json.loads(saved.read_text())
    assert [message["role"] for message in content["messages"]] == [
        "system", "user", "assistant", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert content["messages"][2]["reasoning_content"] == "Hm."
    assert content["messages"][3]["content"] == "Weather\nplease?"
    assert content["messages"][5]["content"] == '{"sky": "rain"}'
    assert content["tools"][0]["function"]["name"] == "weather"
    assert "Be kind." in prompts[0]
    assert "rain" in prompts[2]
    script("Yes.</think>Yes.")
    kimi("chat", k25_int4, input=f"/load {saved}\nSure?\n")
    assert "It rains." in prompts[3]


def test_chat_goes_on_after_an_error(k25_int4: Path, script: Script) -> None:
    script("A.</think>A.", "B.</think>B.")
    lines = ["Hi", "/retry", "/reset", "/retry", "more", "/system", "/help"]
    result = kimi("chat", k25_int4, input="\n".join(lines) + "\n")
    assert "the script has ended" in result.output
    assert "there is no message to answer" in result.output
    assert "/save FILE" in result.output
