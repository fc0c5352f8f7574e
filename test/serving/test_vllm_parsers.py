"""Our parsers behind vLLM's interface: each reported failure, peers' cases, 10,000 random cuts, through vLLM's classes.

KIMI_K2_DRAWS sets how often each text is cut.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from types import FunctionType
from typing import Any

import needs
import peer_cases
import pytest
import test_reported_failures as reported
from parser_cases import as_tuples, call, section, tool

from kimi_k2.tokenization.deltas import Content
from kimi_k2.tokenization.special_tokens import CALL_BEGIN, CALL_END, SECTION_BEGIN, SECTION_END, THINK, THINK_END

needs.engine("vllm")

THREADS = [name for name in vars(reported) if name.startswith("test_") and "prompt" not in name]
CASES = {**{f"vllm {c.name}": c for c in peer_cases.VLLM}, **{f"sglang {c.name}": c for c in peer_cases.SGLANG}}
RUN = tool("run", "command", "timeout")


@pytest.fixture(scope="module")
def through_vllm() -> Any:
    """The harness, with our parsers registered as vLLM's loader of plugins does it."""
    import vllm_parsing

    from kimi_k2.serving.vllm.plugin import register_parsers

    register_parsers()
    register_parsers()  # vLLM may load plugins twice in a process
    return vllm_parsing


def cases_of(function: FunctionType) -> list[dict[str, Any]]:
    """Arguments of a test: those it is parametrized over, or none."""
    for mark in getattr(function, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0] if isinstance(mark.args[0], (list, tuple)) else [mark.args[0]]
            return [dict(zip(names, [value], strict=True)) for value in mark.args[1]]
    return [{}]


@pytest.mark.parametrize("name", THREADS)
def test_thread(name: str, through_vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of that thread, with its parser exchanged for vLLM's composition of ours."""
    for replaced in ("check_cuts", "streamed", "parse_message"):
        monkeypatch.setattr(reported, replaced, getattr(through_vllm, replaced))
    function: Callable[..., None] = getattr(reported, name)
    for arguments in cases_of(function):  # type: ignore[arg-type]
        function(**arguments)


def test_vllms_name_is_ours(through_vllm: Any) -> None:
    from vllm.parser import ParserManager

    for name in ("kimi_k2", "kimi_k2_stream"):
        composed = ParserManager.get_parser(name, name, True)
        assert composed.tool_parser_cls.__name__ == "KimiK2StreamToolParser"
        assert composed.reasoning_parser_cls.__name__ == "KimiK2StreamReasoningParser"


def test_every_thread_of_the_list_is_there() -> None:
    source = inspect.getsource(reported)
    for thread in ("vllm#38579", "vllm#41739", "vllm#50768", "vllm#24478", "vllm#37184", "sglang#23363"):
        assert thread in source
    for thread in ("sglang#23341", "sglang#25358", "sglang#18086", "Kimi-K2#41", "Kimi-K2#100", "Kimi-K2#128"):
        assert thread in source


@pytest.mark.parametrize("name", CASES)
def test_peers_case(name: str, through_vllm: Any) -> None:
    case = CASES[name]
    message = through_vllm.check_cuts(case.text, 20, tools=case.tools, prefilled=case.prefilled)
    assert (message.reasoning_content, message.content) == (case.reasoning, case.content)
    assert as_tuples(message) == case.calls


def test_ten_thousand_cuts_lose_nothing(through_vllm: Any) -> None:
    text = f"{THINK}Two calls.{THINK_END}First: " + section(call(), call("functions.g:1", '{"é": "漢字🙂 <|x|>"}'))
    message = through_vllm.check_cuts(text + " Done.", 5000)  # each as text and as tokens
    assert (message.reasoning_content, message.content) == ("Two calls.", "First:  Done.")


def test_a_quoted_marker_in_a_stream_is_text(through_vllm: Any) -> None:
    """Ordinary tokens that spell a marker: vLLM's text is the same, its token ids are not."""
    tokenizer = through_vllm.TOKENIZER
    quoted = '{"text": "' + CALL_END + SECTION_BEGIN + '"}'
    segments = [(f"{THINK}", True), (f"Say {THINK_END}.", False), (THINK_END + SECTION_BEGIN + CALL_BEGIN, True),
                ("functions.f:0", True), ("<|tool_call_argument_begin|>", True), (quoted, False),
                (CALL_END + SECTION_END, True), (f"No {SECTION_END}", False)]  # fmt: skip
    ids = [token for text, markup in segments for token in tokenizer.encode(text, allow_special=markup)]
    draw = random.Random(0)
    for _ in range(300):
        pieces = through_vllm.tokens_and_text(ids, draw, (1,), (0, 0, 3, 30))
        message, _ = through_vllm.stream(pieces, through_vllm.request(), through_vllm.Tokenizer())
        assert message.reasoning_content == f"Say {THINK_END}."
        assert as_tuples(message) == [("functions.f:0", "f", quoted)]
        assert message.content == f"No {SECTION_END}"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_forced_call_spelled_with_ordinary_tokens(choice: Any, through_vllm: Any) -> None:
    """A grammar takes markers by their text. Within a string of the arguments a spelling is text all the same."""
    tokenizer, draw = through_vllm.TOKENIZER, random.Random(1)
    arguments = '{"text": "a \\" ' + CALL_END + '", "b": "\\\\"}'
    text = section(call("functions.f:0", arguments), call("functions.f:1", "{}"))
    asked = through_vllm.request([tool("f", "text", "b")], tool_choice=choice)
    for _ in range(100):
        ids = tokenizer.encode(text, allow_special=draw.choice([False, True]))
        pieces = through_vllm.tokens_and_text(ids, draw, (1,), (0, 0, 3, 30))
        message, _ = through_vllm.stream(pieces, asked, through_vllm.Tokenizer(), reasoning=None)
        assert message.content == ""
        assert as_tuples(message) == [("functions.f:0", "f", arguments), ("functions.f:1", "f", "{}")]
    assert as_tuples(through_vllm.whole(text, asked, through_vllm.Tokenizer(), reasoning=None)) == as_tuples(message)


def test_arguments_come_as_they_are_written(through_vllm: Any) -> None:
    pieces = [SECTION_BEGIN + CALL_BEGIN + "functions.f:0", "<|tool_call_argument_begin|>", *'{"a": 12}', CALL_END]
    _, deltas = through_vllm.streamed([*pieces, SECTION_END])
    assert [d.tool_calls[0].function.arguments for d in deltas if d.tool_calls] == ["", *'{"a": 12}']


@pytest.mark.parametrize("prefilled", [False, True])
def test_thinking_switched_off(prefilled: bool, through_vllm: Any) -> None:
    tokenizer, asked = through_vllm.Tokenizer(prefilled), through_vllm.request()
    text = "Answer " + section(call())
    for message in (
        through_vllm.whole(text, asked, tokenizer, thinking=False),
        through_vllm.stream([(text, []), ("", [])], asked, tokenizer, thinking=False)[0],
    ):
        assert (message.reasoning_content, message.content, len(message.tool_calls)) == ("", "Answer ", 1)


@pytest.mark.parametrize("text", ['{"a": 1}', "Surely: {"])
def test_a_reply_without_reasoning_to_who_asks_for_json(text: str, through_vllm: Any) -> None:
    """K2-Thinking's. vLLM enforces JSON behind reasoning alone, so it may be none; it is content all the same."""
    answers = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    tokenizer, asked = through_vllm.Tokenizer(), through_vllm.request(response_format=answers)
    for message in (
        through_vllm.whole(text, asked, tokenizer),
        through_vllm.stream([(text, []), ("", [])], asked, tokenizer)[0],
    ):
        assert (message.reasoning_content, message.content) == ("", text)


@pytest.mark.parametrize("end", [" s", " <", " <|tool_call"])
def test_cut_off_in_reasoning_that_the_prompt_opened(end: str, through_vllm: Any) -> None:
    """Also where the last characters may have become a marker."""
    tokenizer, asked = through_vllm.Tokenizer(True), through_vllm.request()
    for message in (
        through_vllm.whole(f"Let me{end}", asked, tokenizer),
        through_vllm.stream([("Let me", []), (end, [])], asked, tokenizer)[0],
    ):
        assert (message.reasoning_content, message.content) == (f"Let me{end}", "")


def test_a_prompt_that_opened_no_reasoning_is_believed(through_vllm: Any) -> None:
    """A closing tag in the text is then no end of reasoning."""
    tokenizer = through_vllm.Tokenizer()
    parser = through_vllm.new_parser(tokenizer, through_vllm.request()).reasoning_parser
    text = f"As you wrote, {THINK_END} ends it"
    assert parser.extract_reasoning(text, through_vllm.request())[0] == "As you wrote, "  # nobody told the prompt
    parser.set_prompt_token_ids(tokenizer.prompt())
    assert parser.extract_reasoning(text, through_vllm.request())[0] is None


def test_a_vocabulary_without_reasoning(through_vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """K2-Instruct's: all is content, in a stream from the beginning."""
    known = {name: token for name, token in through_vllm.Tokenizer().get_vocab().items() if "think" not in name}
    monkeypatch.setattr(through_vllm.Tokenizer, "get_vocab", lambda self: known)
    tokenizer, asked = through_vllm.Tokenizer(), through_vllm.request()
    parser = through_vllm.new_parser(tokenizer, asked).reasoning_parser
    assert parser.is_reasoning_end(tokenizer.prompt())
    assert parser.extract_reasoning(f"so{THINK_END}", asked) == (None, f"so{THINK_END}")


def test_tool_parser_without_reasoning_parser(through_vllm: Any) -> None:
    """Newer versions ask that <think> tags stay content then; 0.24 cannot."""
    import vllm

    text = f"{THINK}why{THINK_END}so" + section(call())
    message, _ = through_vllm.stream(
        [(text, []), ("", [])], through_vllm.request(), through_vllm.Tokenizer(), reasoning=None
    )
    kept = "whyso" if vllm.__version__.startswith("0.24") else f"{THINK}why{THINK_END}so"
    assert (message.content, len(message.tool_calls)) == (kept, 1)


def test_reasoning_parser_without_tool_parser(through_vllm: Any) -> None:
    text = f"{THINK}why{THINK_END}so <b> it is <"
    for pieces in ([text], list(text), [text[:20], text[20:]]):
        message, _ = through_vllm.stream(
            [*((piece, []) for piece in pieces), ("", [])], through_vllm.request(), through_vllm.Tokenizer(), tools=None
        )
        assert (message.reasoning_content, message.content) == ("why", "so <b> it is <")


def test_no_calls_wanted(through_vllm: Any) -> None:
    asked = through_vllm.request(tool_choice="none")
    text = "A" + section(call("functions.f:0", "{}")) + "B"
    message, _ = through_vllm.stream([(text, []), ("", [])], asked, through_vllm.Tokenizer(), reasoning=None)
    assert (message.content, message.tool_calls) == ("Afunctions.f:0{}B", [])


def test_the_requests_tools_name_a_nameless_call(through_vllm: Any) -> None:
    message = through_vllm.check_cuts(section(call("call_7f", '{"command": "ls"}')), 20, tools=[RUN])
    assert as_tuples(message) == [("call_7f", "run", '{"command": "ls"}')]


def test_text_with_markers_is_asked_for(through_vllm: Any) -> None:
    asked = through_vllm.request()
    parser = through_vllm.new_parser(through_vllm.Tokenizer(), asked)
    assert parser.adjust_request(asked).skip_special_tokens is False
    asked.skip_special_tokens = True
    assert parser.reasoning_parser.adjust_request(asked).skip_special_tokens is False


def test_reasoning_tokens_are_counted(through_vllm: Any) -> None:
    encode = through_vllm.TOKENIZER.encode
    text = encode(f"{THINK}one two three{THINK_END}four", allow_special=True)
    parser = through_vllm.new_parser(through_vllm.Tokenizer(), through_vllm.request()).reasoning_parser
    assert parser.count_reasoning_tokens(text) == len(encode("one two three"))
    assert parser.is_reasoning_end(text)
    assert not parser.is_reasoning_end(encode(f"{THINK}one two", allow_special=True))
    assert not parser.is_reasoning_end(encode("one two"))
    assert not parser.is_reasoning_end([*text, through_vllm.TOKENIZER.special_tokens["<|im_middle|>"]])
    assert parser.extract_content_ids(text) == encode("four")


def test_deltas_hold_no_markers(through_vllm: Any) -> None:
    """Content() is what our own stream yields: the same texts, in the same order."""
    text = f"{THINK}a{THINK_END}b" + section(call()) + "c"
    _, deltas = through_vllm.streamed(list(text))
    assert [Content(d.content) for d in deltas if d.content] == [Content("b"), Content("c")]


def test_the_template_that_decides_is_the_requests(through_vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody told the prompt: the request's, else the server's, is rendered to see whether it opens reasoning."""
    asked: list[str | None] = []

    def render(self: Any, messages: list[dict[str, Any]], **options: Any) -> str:
        asked.append(options["chat_template"])
        return THINK

    monkeypatch.setattr(through_vllm.Tokenizer, "apply_chat_template", render)
    for template, served, wanted in (("mine", "served", "mine"), (None, "served", "served"), (None, None, None)):
        options = {} if served is None else {"chat_template": served}
        own = {} if template is None else {"chat_template": template}
        parser = through_vllm.new_parser(through_vllm.Tokenizer(), through_vllm.request(), **options).reasoning_parser
        assert parser.extract_reasoning("so", through_vllm.request(**own)) == ("so", None)
        assert asked.pop() == wanted


@pytest.mark.parametrize(("choice", "skipped"), [("auto", False), ("none", True)])
def test_the_tool_parser_alone_asks_for_markers(choice: str, skipped: bool, through_vllm: Any) -> None:
    asked = through_vllm.request(tool_choice=choice)
    parser = tool_parser(through_vllm, asked)
    asked.skip_special_tokens = True
    assert parser.adjust_request(asked).skip_special_tokens is skipped


def test_what_versions_look_at_to_know_of_calls(through_vllm: Any) -> None:
    """Of a whole reply that something was taken out; of a stream how many calls there were."""
    asked = through_vllm.request()
    for text, taken in (("so", False), (f"so{section('')}", True), ("so" + section(call()), True)):
        assert tool_parser(through_vllm, asked).extract_tool_calls(text, asked).tools_called is taken
    parser = tool_parser(through_vllm, asked)
    parser.extract_tool_calls_streaming("", "", section(call(), call("functions.f:1")), [], [], [], asked)
    parser.finish_streaming()
    assert parser.finish_streaming() is None
    assert (parser.current_tool_id, parser.current_tool_name_sent) == (1, True)
    assert len(parser.prev_tool_call_arr) == len(parser.streamed_args_for_tool) == 2


def tool_parser(through_vllm: Any, asked: Any) -> Any:
    """Ours, as vLLM makes it, by itself."""
    from kimi_k2.serving.vllm.tool_parser import KimiK2StreamToolParser

    return KimiK2StreamToolParser(through_vllm.Tokenizer(), asked.tools)
