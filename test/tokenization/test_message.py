"""The combined parser: reasoning, content and tool calls together, whole, streamed, in tokens, and back in a prompt."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import check_cuts, check_nothing_is_lost, cut, streamed, tool

from kimi_k2.errors import TokenizerError
from kimi_k2.synthetic.checkpoint import write_synthetic_vocabulary
from kimi_k2.tokenization.chat import ChatStyle, apply_chat_template, render_segments
from kimi_k2.tokenization.deltas import ToolCallArguments, ToolCallEnd, ToolCallStart, merged
from kimi_k2.tokenization.lexer import Marker
from kimi_k2.tokenization.message import (
    AssistantMessage,
    Content,
    Delta,
    MessageStream,
    Reasoning,
    ToolCall,
    collect,
    openai_delta,
    opens_reasoning,
    parse_message,
)
from kimi_k2.tokenization.special_tokens import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
)
from kimi_k2.tokenization.tokenizer import KimiTokenizer

CALL = f'{CALL_BEGIN}functions.a.b:0{ARGUMENT_BEGIN}{{"q": "<x>"}}{CALL_END}'
FULL = f"{THINK}why{THINK_END}I will. {SECTION_BEGIN}{CALL}{SECTION_END} done"
EXPECTED = AssistantMessage("why", "I will.  done", [ToolCall("functions.a.b:0", "a.b", '{"q": "<x>"}')], "tool_calls")

TEXTS = [
    (FULL, False),
    (FULL.removeprefix(THINK), True),
    (f"{THINK}calls without closing{SECTION_BEGIN}{CALL}{SECTION_END}", False),
    (f"{THINK}calls without closing{SECTION_BEGIN}{CALL}{SECTION_END}{THINK_END}", False),
    (f"{THINK}never ends", False),
    (f"{THINK_END}answer", True),
    (f"not prefilled{THINK_END}answer", False),
    (f"{THINK}a{THINK_END}{SECTION_BEGIN}{CALL_BEGIN}functions.f:0{ARGUMENT_BEGIN}{{cut", False),
    (f"{SECTION_BEGIN}{CALL}{CALL}{SECTION_END}", False),
    ("plain", False),
    ("", True),
]


def openai_client(stream: MessageStream, pieces: list[str]) -> AssistantMessage:
    """What a client of OpenAI's API assembles from the streamed objects."""
    message = AssistantMessage()
    calls: dict[int, dict[str, Any]] = {}
    for deltas in [*map(stream.feed, pieces), stream.finish()]:
        fields = openai_delta(deltas)
        message.reasoning_content += fields.get("reasoning_content", "")
        message.content += fields.get("content", "")
        for change in fields.get("tool_calls", []):
            call = calls.setdefault(change["index"], {"arguments": ""})
            call.update({key: change[key] for key in ("id",) if key in change})
            call.update({key: change["function"][key] for key in ("name",) if key in change["function"]})
            call["arguments"] += change["function"]["arguments"]
    message.tool_calls = [ToolCall(**call) for _, call in sorted(calls.items())]
    message.finish_reason = str(stream.finish_reason)
    return message


def test_whole_message() -> None:
    assert parse_message(FULL) == EXPECTED


@pytest.mark.parametrize(("text", "prefilled"), TEXTS)
def test_cut_at_every_character(text: str, prefilled: bool) -> None:
    whole = parse_message(text, prefilled=prefilled)
    for pieces in [[text[:place], text[place:]] for place in range(len(text) + 1)] + [list(text)]:
        assert streamed(pieces, prefilled=prefilled)[0] == whole
        client = openai_client(MessageStream(prefilled=prefilled), pieces)
        assert client.to_openai() == whole.to_openai()
        assert client.finish_reason == whole.finish_reason
    check_cuts(text, 20, prefilled=prefilled)


MIXTURE = [THINK, THINK_END, SECTION_BEGIN, SECTION_END, CALL, CALL_BEGIN, CALL_END, ARGUMENT_BEGIN, "functions.f:1",
           "functions.:0", "functions.a.b:7", "functions.", ":", "3", "call_12", "{}", '{"x": 1}', " ", "\n", "text",
           "<|", "<|tool_call", "</th", SECTION_BEGIN + CALL + SECTION_END]  # fmt: skip
TOOLS = [None, [], [tool("f")], [tool("f", "x"), tool("g", "y")]]


@given(
    st.lists(st.sampled_from(MIXTURE), max_size=12), st.booleans(), st.booleans(), st.sampled_from(TOOLS),
    st.lists(st.integers(0, 400), max_size=6),
)  # fmt: skip
@settings(max_examples=500, deadline=None)
def test_any_mixture_any_cuts(pieces: list[str], prefilled: bool, after: bool, tools: Any, cuts: list[int]) -> None:
    text = "".join(pieces)
    options: dict[str, Any] = {"prefilled": prefilled, "after_reasoning": after, "tools": tools}
    whole, _ = streamed([text], **options)
    found, deltas = streamed(cut(text, cuts), **options)
    assert found == whole
    assert not (after and whole.reasoning_content)
    arguments = "".join(c.arguments for c in whole.tool_calls)
    if not any(marker.value in arguments for marker in Marker):
        check_nothing_is_lost(text, whole)
    begun = [delta.index for delta in deltas if isinstance(delta, ToolCallStart)]
    assert begun == list(range(len(begun)))
    assert [delta.index for delta in deltas if isinstance(delta, ToolCallEnd)] == begun


def test_openai_deltas() -> None:
    stream = MessageStream(prefilled=True)
    assert stream.feed("why") == [Reasoning("why")]
    deltas = stream.feed(f"{THINK_END}ok{SECTION_BEGIN}{CALL_BEGIN}functions.f:3{ARGUMENT_BEGIN}{{")
    assert openai_delta(deltas) == {
        "content": "ok",
        "tool_calls": [
            {"index": 0, "id": "functions.f:3", "type": "function", "function": {"name": "f", "arguments": ""}},
            {"index": 0, "function": {"arguments": "{"}},
        ],
    }
    assert stream.finish_reason is None
    deltas = stream.feed("}" + CALL_END)
    assert openai_delta(deltas) == {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}
    assert openai_delta(stream.finish()) == {}
    assert stream.finish_reason == "tool_calls"


IN_CALL = f"{SECTION_BEGIN}{CALL_BEGIN}functions.f:0{ARGUMENT_BEGIN}{{"


@pytest.mark.parametrize(("text", "reason", "expected"), [
    ("done", None, "stop"), ("done", "stop", "stop"), ("cut", "length", "length"),
    (FULL, None, "tool_calls"), (FULL, "stop", "tool_calls"), (FULL, "length", "length"),
    (IN_CALL, None, "length"), (IN_CALL, "length", "length"), (IN_CALL, "stop", "tool_calls"),
    (f"{THINK}cut", None, "length"), (f"{THINK}odd", "stop", "stop"), (f"{THINK}a{THINK_END}", None, "stop"),
])  # fmt: skip
def test_finish_reasons(text: str, reason: Any, expected: str) -> None:
    assert parse_message(text, reason=reason).finish_reason == expected


def test_neighbouring_text_is_joined() -> None:
    deltas: list[Delta] = [
        Content("a"),
        Content(""),
        Content("b"),
        Reasoning("c"),
        Content("d"),
        ToolCallArguments(0, ""),
    ]
    assert merged(deltas) == [Content("ab"), Reasoning("c"), Content("d")]


@pytest.mark.parametrize("style", [ChatStyle.THINKING, ChatStyle.K25])
def test_a_parsed_message_renders_to_the_same_text(style: ChatStyle) -> None:
    text = f"{THINK}why{THINK_END}I will. {SECTION_BEGIN}{CALL}{SECTION_END}"
    prompt: list[Any] = [{"role": "user", "content": "go"}]
    opened = render_segments(prompt, style=style)
    generated = text.removeprefix(THINK) if opens_reasoning(opened) else text
    message = parse_message(generated, prefilled=opens_reasoning(opened)).to_openai()
    json.dumps(message)
    again = apply_chat_template([*prompt, message], style=style, add_generation_prompt=False)
    assert again == "".join(segment.text for segment in opened) + generated + "<|im_end|>"


def test_which_prompts_open_reasoning() -> None:
    user = [{"role": "user", "content": THINK}]
    assert opens_reasoning(render_segments(user, style="k2.5"))
    assert not opens_reasoning(render_segments(user, style="k2.5", thinking=False))
    assert not opens_reasoning(render_segments(user, style="thinking"))
    assert not opens_reasoning([])


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> KimiTokenizer:
    directory = tmp_path_factory.mktemp("vocabulary")
    write_synthetic_vocabulary(directory, 768)
    return KimiTokenizer.from_pretrained(directory)


def from_tokens(tokenizer: KimiTokenizer, tokens: list[int]) -> AssistantMessage:
    stream = MessageStream(tokenizer=tokenizer)
    deltas = [delta for token in tokens for delta in stream.feed_token(token)] + stream.finish()
    return collect(deltas, str(stream.finish_reason))


@given(st.lists(st.sampled_from([*MIXTURE, "é汉", "\U0001f600"]), max_size=10))
@settings(max_examples=100, deadline=None)
def test_tokens_give_what_their_text_gives(tokenizer: KimiTokenizer, pieces: list[str]) -> None:
    tokens = tokenizer.encode("".join(pieces), allow_special=True)
    assert from_tokens(tokenizer, tokens) == parse_message("".join(pieces))


def test_markers_spelled_in_ordinary_tokens_are_text(tokenizer: KimiTokenizer) -> None:
    quoted = f"write {CALL_END}{SECTION_END} and {THINK}"
    before = tokenizer.encode(f"{THINK}a{THINK_END}", allow_special=True)
    assert from_tokens(tokenizer, before + tokenizer.encode(quoted)).content == quoted
    tokens = tokenizer.encode(IN_CALL, allow_special=True) + tokenizer.encode(quoted + "}")
    tokens += tokenizer.encode(CALL_END + SECTION_END, allow_special=True)
    assert from_tokens(tokenizer, tokens).tool_calls == [ToolCall("functions.f:0", "f", "{" + quoted + "}")]


def test_tokens_cut_no_character(tokenizer: KimiTokenizer) -> None:
    tokens = tokenizer.encode("é汉\U0001f600")
    assert from_tokens(tokenizer, tokens).content == "é汉\U0001f600"
    assert from_tokens(tokenizer, tokens[:-1]).content == "é汉\ufffd"


def test_tokens_need_a_tokenizer(tokenizer: KimiTokenizer) -> None:
    with pytest.raises(TokenizerError, match="made with a tokenizer"):
        MessageStream().feed_token(1)
    with pytest.raises(TokenizerError, match="token id 99999"):
        MessageStream(tokenizer=tokenizer).feed_token(99999)


def test_work_and_memory_are_linear_in_the_stream() -> None:
    """Of a call with 200 kB of arguments nothing is kept that could be scanned again; its deltas are its text."""
    arguments = json.dumps({"text": "<" * 1000 + "x" * 199_000})
    stream = MessageStream()
    stream.feed(IN_CALL.removesuffix("{"))
    pieces = cut(arguments, range(0, len(arguments), 50))
    tracemalloc.start()
    emitted = 0
    for piece in pieces:
        for delta in stream.feed(piece):
            assert isinstance(delta, ToolCallArguments)
            emitted += len(delta.text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert emitted == len(arguments)
    assert peak < 50_000
    whole = parse_message(f"{IN_CALL.removesuffix('{')}{arguments}{CALL_END}{SECTION_END}")
    assert whole.tool_calls[0].arguments == arguments


def test_vllm_50768_ids_in_the_prompt() -> None:
    """vllm#50768, its cause: the template shows an id as it is, and nothing else names the function."""
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "tool_calls": [{"id": "call_0b8c", "function": {"name": "run", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "call_0b8c", "content": "ok"},
    ]
    for style in ChatStyle:
        text = apply_chat_template(history, style=style)
        assert "call_0b8c" not in text
        assert text.count("functions.run:0") == 2


def test_kimi_k2_128_an_empty_turn_after_reasoning() -> None:
    """MoonshotAI/Kimi-K2#128: K2.6 ended its turn right after </think> in follow-ups to tool calls. The cause is the
    prompt: ids of another form, and reasoning of the chain of calls that was not put back. The empty turn itself is a
    message with reasoning, no content and finish_reason stop, not an error.
    """
    call_x = {"id": "toolu_01", "function": {"name": "run", "arguments": {"command": "ls"}}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "reasoning_content": "First ls.", "tool_calls": [call_x]},
        {"role": "tool", "tool_call_id": "toolu_01", "content": "a.py"},
    ]
    text = apply_chat_template(history, style="k2.5")
    assert f"{THINK}First ls.{THINK_END}{SECTION_BEGIN}{CALL_BEGIN}functions.run:0{ARGUMENT_BEGIN}" in text
    assert "## Return of functions.run:0\na.py<|im_end|>" in text
    assert opens_reasoning(render_segments(history, style="k2.5"))
    message = parse_message(f"All done.{THINK_END}", prefilled=True, reason="stop")
    assert (message.reasoning_content, message.content, message.finish_reason) == ("All done.", "", "stop")
    assert message.to_openai() == {"role": "assistant", "content": "", "reasoning_content": "All done."}
