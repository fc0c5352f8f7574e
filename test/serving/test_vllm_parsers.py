"""Our parsers behind vLLM's interface: each reported failure, peers' cases, 10,000 random cuts, through vLLM's classes.

KIMI_K2_DRAWS sets how often each text is cut.
"""

from __future__ import annotations

import importlib
import random
from typing import Any

import engines
import pytest
import vllm_parsing
from parser_cases import as_tuples, call, section, tool
from peer_cases import OF_PEERS

from kimi_k2.serving.vllm.plugin import register_parsers
from kimi_k2.tokenization.special_tokens import CALL_BEGIN, CALL_END, SECTION_BEGIN, SECTION_END, THINK, THINK_END

engines.need("vllm")
for _ in range(2):  # vLLM may load plugins twice in a process
    register_parsers()
vllm = importlib.import_module("vllm")

BEHIND = ("why", "so <b> it is <", 0)
TEXT = f"{THINK}why{THINK_END}{BEHIND[1]}"


def test_vllms_name_is_ours() -> None:
    from vllm.parser import ParserManager

    for name in ("kimi_k2", "kimi_k2_stream"):
        composed = ParserManager.get_parser(name, name, True)
        assert composed.tool_parser_cls.__name__ == "KimiK2StreamToolParser"
        assert composed.reasoning_parser_cls.__name__ == "KimiK2StreamReasoningParser"


@pytest.mark.parametrize("name", OF_PEERS)
def test_peers_case(name: str) -> None:
    case = OF_PEERS[name]
    message = vllm_parsing.check_cuts(case.text, 20, tools=case.tools, prefilled=case.prefilled)
    assert (message.reasoning_content, message.content) == (case.reasoning, case.content)
    assert as_tuples(message) == case.calls


def test_ten_thousand_cuts_lose_nothing() -> None:
    text = f"{THINK}Two calls.{THINK_END}First: " + section(call(), call("functions.g:1", '{"é": "漢字🙂 <|x|>"}'))
    message = vllm_parsing.check_cuts(text + " Done.", 5000)  # each as text and as tokens
    assert (message.reasoning_content, message.content) == ("Two calls.", "First:  Done.")


JSON_TEXT = '{"text": "' + CALL_END + SECTION_BEGIN + '"}'
QUOTED = [
    (f"{THINK}", True), (f"Say {THINK_END}.", False), (THINK_END + SECTION_BEGIN + CALL_BEGIN, True),
    ("functions.f:0", True), ("<|tool_call_argument_begin|>", True), (JSON_TEXT, False),
    (CALL_END + SECTION_END, True), (f"No {SECTION_END}", False),
]  # fmt: skip
# A grammar takes markers by their text. Within a string of the arguments a spelling is text all the same.
ESCAPED = '{"text": "a \\" ' + CALL_END + '", "b": "\\\\"}'
FORCED = [(section(call("functions.f:0", ESCAPED), call("functions.f:1", "{}")), None)]
OF_F: Any = {"type": "function", "function": {"name": "f"}}
TWICE = [("functions.f:0", "f", ESCAPED), ("functions.f:1", "f", "{}")]


@pytest.mark.parametrize(
    ("segments", "choice", "wanted"),
    [
        (QUOTED, "auto", (f"Say {THINK_END}.", f"No {SECTION_END}", [("functions.f:0", "f", JSON_TEXT)])),
        (FORCED, "required", ("", "", TWICE)),
        (FORCED, OF_F, ("", "", TWICE)),
    ],
)
def test_ordinary_tokens_that_spell_markers(segments: list[tuple[str, bool | None]], choice: Any, wanted: Any) -> None:
    """vLLM's text is the same as of special tokens, its token ids are not; of a forced call either may come."""
    tokenizer, draw = vllm_parsing.TOKENIZER, random.Random(0)
    asked = vllm_parsing.request([tool("f", "text", "b")], tool_choice=choice)
    options = {} if choice == "auto" else {"reasoning": None}
    for _ in range(200):
        either = draw.choice([False, True])
        ids = [
            token
            for text, markup in segments
            for token in tokenizer.encode(text, allow_special=either if markup is None else markup)
        ]
        pieces = vllm_parsing.tokens_and_text(ids, draw, (1,), (0, 0, 3, 30))
        message, _ = vllm_parsing.stream(pieces, asked, vllm_parsing.Tokenizer(), **options)
        assert (message.reasoning_content, message.content, as_tuples(message)) == wanted
    if options:
        message = vllm_parsing.whole(segments[0][0], asked, vllm_parsing.Tokenizer(), **options)
        assert as_tuples(message) == wanted[2]


def test_arguments_come_as_they_are_written() -> None:
    pieces = [SECTION_BEGIN + CALL_BEGIN + "functions.f:0", "<|tool_call_argument_begin|>", *'{"a": 12}', CALL_END]
    pieces = [(piece, []) for piece in (*pieces, SECTION_END, "")]
    _, deltas = vllm_parsing.stream(pieces, vllm_parsing.request(), vllm_parsing.Tokenizer())
    assert [d.tool_calls[0].function.arguments for d in deltas if d.tool_calls] == ["", *'{"a": 12}']


JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}}
OFF: dict[str, Any] = {"thinking": False}
ALONE: dict[str, Any] = {"reasoning": None}


@pytest.mark.parametrize(
    ("pieces", "prefilled", "fields", "options", "wanted"),
    [
        (["Answer " + section(call())], False, {}, OFF, ("", "Answer ", 1)),
        (["Answer " + section(call())], True, {}, OFF, ("", "Answer ", 1)),
        # K2-Thinking's. vLLM enforces JSON behind reasoning alone, so it may be none; it is content all the same.
        (['{"a": 1}'], False, JSON, {}, ("", '{"a": 1}', 0)),
        (["Surely: {"], False, JSON, {}, ("", "Surely: {", 0)),
        # Cut off in reasoning that the prompt opened, also where the last characters may have become a marker.
        (["Let me", " s"], True, {}, {}, ("Let me s", "", 0)),
        (["Let me", " <"], True, {}, {}, ("Let me <", "", 0)),
        (["Let me", " <|tool_call"], True, {}, {}, ("Let me <|tool_call", "", 0)),
        # One parser alone; newer versions ask that <think> tags stay content then, 0.24 cannot.
        ([f"{THINK}why{THINK_END}so" + section(call())], False, {}, ALONE, ("", f"{THINK}why{THINK_END}so", 1)),
        # Either of two words that differ, as vLLM's own takes them; a tag in a call's id is dropped.
        ([TEXT], False, {}, OFF | {"enable_thinking": True}, BEHIND),
        (["so" + section(call(f"functions.f{THINK}:0"))], False, {}, ALONE, ("", "so", 1)),
        *((cut, False, {}, {"tools": None}, BEHIND) for cut in ([TEXT], list(TEXT), [TEXT[:20], TEXT[20:]])),
        (["A" + section(call("functions.f:0", "{}")) + "B"], False, {"tool_choice": "none"}, ALONE,
         ("", "Afunctions.f:0{}B", 0)),
    ],
)  # fmt: skip
def test_reply(
    pieces: list[str], prefilled: bool, fields: dict[str, Any], options: dict[str, Any], wanted: Any
) -> None:
    """Streamed, and whole where both parsers serve."""
    tokenizer, asked = vllm_parsing.Tokenizer(prefilled), vllm_parsing.request(**fields)
    found = [vllm_parsing.stream([*((piece, []) for piece in pieces), ("", [])], asked, tokenizer, **options)[0]]
    if not options.keys() & {"reasoning", "tools"}:
        found.append(vllm_parsing.whole("".join(pieces), asked, tokenizer, **options))
    elif vllm.__version__.startswith("0.24"):
        wanted = (wanted[0], wanted[1].replace(THINK, "").replace(THINK_END, ""), wanted[2])
    for message in found:
        assert (message.reasoning_content, message.content, len(message.tool_calls)) == wanted


def test_ids_are_told_apart_as_vllms_own_parser_does() -> None:
    engine, tokenizer = pytest.importorskip("vllm.parser.engine.registered_adapters"), vllm_parsing.Tokenizer()
    ours = vllm_parsing.new_parser(tokenizer, vllm_parsing.request()).reasoning_parser
    theirs = engine.KimiK2ParserReasoningAdapter(tokenizer)
    for behind in (f"{THINK_END}so", f"a{THINK}b{THINK_END}so", f"why{SECTION_BEGIN}", f"{THINK_END}{THINK}a"):
        ids = vllm_parsing.TOKENIZER.encode(THINK + behind, allow_special=True)
        assert ours.extract_content_ids(ids) == theirs.extract_content_ids(ids)
        assert ours.count_reasoning_tokens(ids) == theirs.count_reasoning_tokens(ids)


def test_a_prompt_that_opened_no_reasoning_is_believed() -> None:
    """A closing tag in the text is then no end of reasoning."""
    tokenizer = vllm_parsing.Tokenizer()
    parser = vllm_parsing.new_parser(tokenizer, vllm_parsing.request()).reasoning_parser
    text = f"As you wrote, {THINK_END} ends it"
    assert parser.extract_reasoning(text, vllm_parsing.request())[0] == "As you wrote, "  # nobody told the prompt
    for behind, wanted in (("", None), (f"{THINK}\n", "As you wrote, ")):  # a template may end in a line break
        parser.set_prompt_token_ids(tokenizer.prompt() + vllm_parsing.TOKENIZER.encode(behind, allow_special=True))
        assert parser.extract_reasoning(text, vllm_parsing.request())[0] == wanted


def test_a_vocabulary_without_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    """K2-Instruct's: all is content, in a stream from the beginning."""
    known = {name: token for name, token in vllm_parsing.Tokenizer().get_vocab().items() if "think" not in name}
    monkeypatch.setattr(vllm_parsing.Tokenizer, "get_vocab", lambda self: known)
    tokenizer, asked = vllm_parsing.Tokenizer(), vllm_parsing.request()
    parser = vllm_parsing.new_parser(tokenizer, asked).reasoning_parser
    assert parser.is_reasoning_end(tokenizer.prompt())
    assert parser.extract_reasoning(f"so{THINK_END}", asked) == (None, f"so{THINK_END}")


def test_the_template_that_decides_is_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody told the prompt: the request's, else the server's, is rendered to see whether it opens reasoning."""
    asked: list[str | None] = []

    def render(self: Any, messages: list[dict[str, Any]], **options: Any) -> str:
        asked.append(options["chat_template"])
        return THINK

    monkeypatch.setattr(vllm_parsing.Tokenizer, "apply_chat_template", render)
    for template, served, wanted in (("mine", "served", "mine"), (None, "served", "served"), (None, None, None)):
        options = {} if served is None else {"chat_template": served}
        own: dict[str, Any] = {} if template is None else {"chat_template": template}
        parser = vllm_parsing.new_parser(vllm_parsing.Tokenizer(), vllm_parsing.request(), **options).reasoning_parser
        assert parser.extract_reasoning("so", vllm_parsing.request(**own)) == ("so", None)
        assert asked.pop() == wanted


@pytest.mark.parametrize(("choice", "skipped"), [("auto", False), ("none", True)])
def test_the_tool_parser_alone_asks_for_markers(choice: str, skipped: bool) -> None:
    asked = vllm_parsing.request(tool_choice=choice)
    parser = tool_parser(asked)
    asked.skip_special_tokens = True
    assert parser.adjust_request(asked).skip_special_tokens is skipped


def test_a_reply_that_something_was_taken_out_of() -> None:
    """vLLM 0.24 shows the others as they were."""
    asked = vllm_parsing.request()
    for text, taken in (("so", False), (f"so{section('')}", True), ("so" + section(call()), True)):
        assert tool_parser(asked).extract_tool_calls(text, asked).tools_called is taken
    parser = tool_parser(asked)
    parser.extract_tool_calls_streaming("", "", "so <", [], [], [], asked)
    assert (parser.finish_streaming().content, parser.finish_streaming()) == ("<", None)


def tool_parser(asked: Any) -> Any:
    """Ours, as vLLM makes it, by itself."""
    from kimi_k2.serving.vllm.tool_parser import KimiK2StreamToolParser

    return KimiK2StreamToolParser(vllm_parsing.Tokenizer(), asked.tools)
