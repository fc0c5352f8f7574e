"""What vLLM's and SGLang's own tests of their Kimi-K2 parsers cover, once each: texts, and what we make of them.

And texts of failures that users reported of them and of the model's own repository, by the number of the thread.

Sources: vLLM tests/tool_parsers/test_kimi_k2_tool_parser.py and tests/parser/engine/test_kimi_k2{,_streaming}.py;
SGLang test/registered/function_call/test_kimik2_detector.py, its unit tests, and those of sglang-jax. Where we differ
on purpose, `difference` is the row of docs/parsers.md that gives the reason.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from parser_cases import call, section, tool, without_markers

from kimi_k2.tokenization.special_tokens import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
)


@dataclass(frozen=True)
class Case:
    """A text and its message; calls are (id, name, arguments)."""

    name: str
    text: str
    content: str = ""
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    reasoning: str = ""
    tools: list[dict[str, Any]] | None = None
    prefilled: bool = False
    finish_reason: str | None = None
    cut: bool = False  # the last call has no end
    difference: str | None = None


WEATHER = tool("weather", "city", "unit")
READ = tool("read", "path")
BOOK = tool("book", "city")
PATH = '{"path": "a.py"}'
OSLO, LIMA = '{"city": "Oslo"}', '{"city": "Lima"}'


def weather(index: int, arguments: str = OSLO) -> str:
    result: str = call(f"functions.weather:{index}", arguments)
    return result


def weathers(index: int, arguments: str = OSLO) -> tuple[str, str, str]:
    return (f"functions.weather:{index}", "weather", arguments)


NESTED = json.dumps({"path": "notes.md", "text": "# T\n```py\nd = {'k': [1, {}]}\n```\n} end {"})
LINES = '{\n  "name": "n",\n  "value": 12\n}'
BROKEN = '{"city": "Oslo", "ok": flase'

VLLM = [
    Case(
        "three functions",
        "All. " + section(weather(0), call("functions.news:1", "{}"), call("functions.mail:2", '{"to": "a@b.c"}')),
        "All. ",
        [weathers(0), ("functions.news:1", "news", "{}"), ("functions.mail:2", "mail", '{"to": "a@b.c"}')],
    ),
    Case("JSON over several lines", section(weather(0, LINES)), "", [weathers(0, LINES)]),
    Case("id without a prefix", section(call("weather:0", OSLO)), "", [("weather:0", "weather", OSLO)]),
    Case(
        "id that cannot be read beside a good one", section(call("functions.weather.0", OSLO), weather(1, LIMA)),
        "", [("functions.weather.0", "weather", OSLO), weathers(1, LIMA)], tools=[READ, WEATHER],
        difference="ids that cannot be read"),
    Case("bare counter, one tool, broken JSON", section(call("0", BROKEN)), "0" + BROKEN, tools=[WEATHER],
         difference="ids that cannot be read"),
    Case("bare counter, several tools", section(call("0", OSLO)), "", [("0", "weather", OSLO)], tools=[READ, WEATHER]),
    Case("bare counter and spaces", section(CALL_BEGIN + "0 " + ARGUMENT_BEGIN + OSLO + CALL_END), "",
         [("0", "weather", OSLO)], tools=[WEATHER]),
    Case("text before the first call of a section", SECTION_BEGIN + " noise " + weather(0) + SECTION_END, " noise ",
         [weathers(0)], difference="text inside a section"),
    Case("empty section", "Why. " + section(), "Why. "),
    Case("arguments cut off", "I look. " + SECTION_BEGIN + weather(0)[: -len('lo"}' + CALL_END)], "I look. ",
         [weathers(0, '{"city": "Os')], finish_reason="length", cut=True),
    Case("text after the section", "Before. " + section(weather(0)) + " After.", "Before.  After.", [weathers(0)],
         difference="text after a section"),
    Case("spaces around id and arguments", section(call("functions.weather:0 ", OSLO + " ")), "",
         [weathers(0, OSLO + " ")], difference="white space around arguments"),
    Case("line break before the id", section(call("\nfunctions.weather:0", OSLO)), "", [weathers(0)]),
    Case("reasoning that a call ends", f"{THINK}No tag." + weather(0), "", [weathers(0)], "No tag."),
    Case("reasoning that the prompt opened", f"One.{THINK_END}Answer.", "Answer.", [], "One.", prefilled=True),
    Case("values of another type than the schema's", section(weather(0, '{"count": "3"}')), "",
         [weathers(0, '{"count": "3"}')], difference="types of argument values"),
]  # fmt: skip

SGLANG = [
    Case("name of an MCP tool", section(call("functions.mcp__portal__search-docs:1", "{}")), "",
         [("functions.mcp__portal__search-docs:1", "mcp__portal__search-docs", "{}")]),
    Case("text that ends in an angle bracket", "a < b <", "a < b <"),
    Case("stray end of a section", f"normal text{SECTION_END}", "normal text"),
    Case("stray begin of arguments", f"text{ARGUMENT_BEGIN}more", "textmore"),
    Case("markers alone", SECTION_BEGIN + CALL_BEGIN + ARGUMENT_BEGIN + CALL_END + SECTION_END, ""),
    Case("stray markers around text", f"leaked{SECTION_BEGIN}{CALL_END}content", "leakedcontent"),
    Case("two calls inside reasoning", f"{THINK}Both." + section(weather(0), weather(1)), "",
         [weathers(0), weathers(1)], "Both."),
    Case("text between reasoning and a call", f"{THINK}Hm.{THINK_END}This is it:" + section(weather(0)), "This is it:",
         [weathers(0)], "Hm."),
    Case("text between two sections", "First:" + section(weather(0)) + " Next: " + section(weather(1)),
         "First: Next: ", [weathers(0), weathers(1)]),
    Case("id that cannot be read, then a good one", "Text" + section(call("weird@id", OSLO)) + section(weather(0)),
         "Text", [("weird@id", "weather", OSLO), weathers(0)], tools=[WEATHER, READ],
         difference="ids that cannot be read"),
    Case("braces and code in arguments", section(call("functions.read:0", NESTED)), "",
         [("functions.read:0", "read", NESTED)]),
    Case("bare counter without tools", section(call("5", '{"x": 1}')), '5{"x": 1}',
         difference="ids that cannot be read"),
    Case("call without an end before another", SECTION_BEGIN + CALL_BEGIN + "functions.read:0" + weather(1)
         + SECTION_END, "functions.read:0", [weathers(1)], difference="ids that cannot be read"),
    Case("line breaks in a section", "Look.\n" + SECTION_BEGIN + "\n" + weather(0) + "\n" + weather(1) + "\n"
         + SECTION_END, "Look.\n", [weathers(0), weathers(1)]),
    Case("call without a section", weather(0), "", [weathers(0)]),
]  # fmt: skip

LONG = json.dumps({"city": "a.py", "text": 'def f():\n    return "<|{}|>"\n' * 300})  # more than 8,192 characters
REPORTED = [
    # A greedy pattern ran over a call's end into the next one: two calls came back as a garbled one.
    Case("vllm#24478", "Both: " + section(weather(0), weather(1, '{"city": "<b>"}'), weather(2)), "Both: ",
         [weathers(0), weathers(1, '{"city": "<b>"}'), weathers(2)]),
    # A section was given up after 8,192 characters, and text before its first call leaked out with markers.
    Case("vllm#37184", "Write: " + section("\n", weather(0, LONG), weather(1)), "Write: ",
         [weathers(0, LONG), weathers(1)]),
    # Text before the section lost, an id after a line break dropped.
    Case("vllm#38579", "Before." + SECTION_BEGIN + call("\nfunctions.weather:0", OSLO) + weather(1, "{}") + SECTION_END
         + "After.", "Before.After.", [weathers(0), weathers(1, "{}")]),
    # K2.6 wrote arguments that are no JSON object.
    *(Case(f"vllm#41739 {text}", section(weather(0, text), weather(1)), "", [weathers(0, text), weathers(1)])
      for text in ('{"input": "{"key": "value"}"}', '{"input": "{\\"key\\": 1}"', '"{}"')),
    # The history held ids of the Responses API, so the model wrote one instead of a name; later, `callNNNNN`.
    *(Case(f"vllm#50768 sglang#25358 {name}", section(call(f" {name} ", OSLO), call("functions.read:3", PATH)), "",
           [(name, "book", OSLO), ("functions.read:3", "read", PATH)], tools=[READ, BOOK])
      for name in ("call_0b8c5b0f2b6f4c0e", "chatcmpl-tool-5f1e", "call-7", "fc_68", "call12345", "call_1")),
    Case("sglang#25358 of no tool", section(call("call00001", '{"x": 1}'), call("functions.read:3", PATH)),
         'call00001{"x": 1}', [("functions.read:3", "read", PATH)], tools=[READ, BOOK],
         difference="ids that cannot be read"),
    # K2.5 calls a tool without closing <think>; the call was taken for reasoning and never made.
    *(Case(f"sglang#18086 {opening}", f"{opening}I need it.{section(weather(0))}{THINK_END}", "", [weathers(0)],
           "I need it.", prefilled=not opening) for opening in (THINK, "")),
    # At the token limit the answer came back empty with finish_reason stop.
    Case("sglang#23341", f"{THINK}Long thoughts", "", [], "Long thoughts", finish_reason="length"),
    # From the second turn on, streams with long arguments lost calls or hung; names with a hyphen were not matched.
    Case("sglang#23363", "Now:" + section(weather(16, LONG), call("functions.list-files:17", "{}")) + "Done.",
         "Now:Done.", [weathers(16, LONG), ("functions.list-files:17", "list-files", "{}")]),
    # The list of calls came back empty: the model had left out the section's begin, or had written "null" before it.
    *(Case(f"Kimi-K2#41 {before!r}", before + weather(0) + SECTION_END, before, [weathers(0)])
      for before in ("", "null", "\n")),
    # The agent's screen filled with raw markers after the first call, in the reasoning and in the answer.
    Case("Kimi-K2#100", f"{THINK}Look around. {SECTION_BEGIN} {CALL_BEGIN} functions.weather:0 {ARGUMENT_BEGIN} {{}} "
         f"{CALL_END} {SECTION_END}{THINK_END} Then {section(weather(1))}", " Then ",
         [weathers(0, " {} "), weathers(1)], "Look around. "),
]  # fmt: skip
# What engines' own parsers are held to.
OF_PEERS = {f"{case.name} {at}": case for at, case in enumerate((*VLLM, *SGLANG, *REPORTED))}

F, G = ("functions.f:0", "f", '{"a": 1}'), ("functions.g:1", "g", "")
CALL_G = call("functions.g:1", "")
HEAD = SECTION_BEGIN + CALL_BEGIN + "functions.f:0" + ARGUMENT_BEGIN
OWN = [
    Case("name with a colon", section(call("functions.ns:f:3")), "", [("functions.ns:f:3", "ns:f", F[2])]),
    Case("name called functions", section(call("functions.functions.x:0")), "",
         [("functions.functions.x:0", "functions.x", F[2])]),
    Case("white space between", section("\n ", call(" functions.f:0 "), "\n", CALL_G, "\n"), "", [F, G]),
    Case("white space after the id's colon", section(call("functions.f: 0")), "", [("functions.f: 0", "f", F[2])]),
    Case("white space alone in a section", SECTION_BEGIN + "  \n"),
    Case("white space before text in a section", SECTION_BEGIN + "  \nx ", "  \nx "),
    Case("section not closed", SECTION_BEGIN + call(), "", [F]),
    Case("singular section", f"<|tool_call_section_begin|>{call()}<|tool_call_section_end|>", "", [F]),
    Case("markers in arguments that cannot end them",
         section(call(arguments=f"{THINK}{ARGUMENT_BEGIN}{THINK_END}")) + THINK_END, "",
         [(*F[:2], f"{THINK}{ARGUMENT_BEGIN}{THINK_END}")]),
    Case("a tag in arguments that tell the tool", section(call("call_x", f'{{"city": "{THINK}"}}')), "",
         [("call_x", "weather", f'{{"city": "{THINK}"}}')], tools=[WEATHER, READ]),
    Case("what cannot be read beside what can", section(call("what?"), CALL_G), 'what?{"a": 1}', [G]),
    # A call cut off, or ended by another marker, is kept.
    Case("cut in a marker", HEAD + "{}<|tool_call_e", "", [(*F[:2], "{}<|tool_call_e")], finish_reason="length",
         cut=True),
    Case("no arguments yet", HEAD, "", [(*F[:2], "")], finish_reason="length", cut=True),
    Case("cut after a good one", SECTION_BEGIN + call() + CALL_BEGIN + "functions.g:1" + ARGUMENT_BEGIN, "", [F, G],
         finish_reason="length", cut=True),
    Case("not closed before the section's end", HEAD + "{}" + SECTION_END, "", [(*F[:2], "{}")], cut=True),
    Case("section within arguments", HEAD + SECTION_BEGIN + SECTION_END, "", [(*F[:2], "")], cut=True),
    # Nothing tells a function: all comes back as content, without the markers.
    *(Case(f"malformed {text}", text, without_markers(text)) for text in (
        section("hello"), "x" + SECTION_BEGIN,
        *(section(call(name)) for name in ("", "functions.f", "functions.f g:0", "functions.f:x", "functions.f:\u0663",
                                           "functions.:0", ":0", "call_6b0e7c24")),
        section(CALL_BEGIN + "functions.f:0" + CALL_BEGIN + "functions.f:0"),
        SECTION_BEGIN + SECTION_BEGIN + SECTION_END, section(call("what?", f"{THINK}{{{ARGUMENT_BEGIN}}}")))),
    Case("header cut", SECTION_BEGIN + CALL_BEGIN + "functions.f", "functions.f", finish_reason="length"),
    Case("opened twice", f"{THINK}why{THINK_END}answer", "answer", reasoning="why", prefilled=True),
    Case("white space around reasoning", f"\n {THINK}why{THINK_END}\nanswer", "\nanswer", reasoning="why"),
    Case("empty reasoning", f"{THINK}{THINK_END}answer", "answer"),
    Case("never ends", "never ends", "", reasoning="never ends", prefilled=True, finish_reason="length"),
    Case("cut in a tag", f"{THINK}cut </thi", "", reasoning="cut </thi", finish_reason="length"),
    Case("only a tag's beginning", "<thin", "<thin"),
    Case("white space before a cut tag", "  <thin", "", reasoning="  <thin", prefilled=True, finish_reason="length"),
    # MoonshotAI/Kimi-K2#128: K2.6 ended its turn there; a message without content is no error.
    Case("nothing after reasoning", f"All done.{THINK_END}", "", reasoning="All done.", prefilled=True),
    # Tags out of place are dropped, the text stays.
    Case("closed late", f"answer{THINK_END}more", "answermore"),
    Case("opened late", f"answer{THINK}late{THINK_END}", "answerlate"),
    Case("closed alone", f"{THINK_END}x", "x"),
    Case("tags in reasoning", f"{THINK}a{THINK}b{THINK_END}c{THINK_END}d", "cd", reasoning="ab"),
    Case("markers in reasoning", f"{THINK}a{SECTION_END}{CALL_END}b", "", reasoning="ab", finish_reason="length"),
]  # fmt: skip
