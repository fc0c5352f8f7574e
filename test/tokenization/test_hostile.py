"""Hostile input: templates that would run or grow for ever, deep nesting, long names, malformed declarations."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import apply_chat_template, as_tuples, call, section, tool

from kimi_k2.errors import TokenizerError
from kimi_k2.tokenization import renderer, template
from kimi_k2.tokenization.message import parse_message
from kimi_k2.tokenization.special_tokens import special_tokens
from kimi_k2.tokenization.style import ChatStyle
from kimi_k2.tokenization.template import ChatTemplate
from kimi_k2.tokenization.tool_declaration import typescript_declaration

NAMES = special_tokens(1792)
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi <|im_end|>"}]


@pytest.fixture
def short_patience(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A tenth of a second of CPU time, and no more than 64 MB here, whatever a template tries in its process."""
    monkeypatch.setattr(renderer, "MAX_SECONDS", 0.1)
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64e6


GROW = "{% set n = namespace(v='ab') %}{% for i in range(60) %}"
LIMIT = "more than 0.1 s of CPU time|too much memory"
HOSTILE = {
    "long range": ("{% for i in range(10**12) %}{% endfor %}", "Range too big"),
    "range beyond 64 bits": ("{% for i in range(0, 10**30, 3) %}{% endfor %}", "too large"),
    "loops in loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", LIMIT),
    "lazy filters": ("{% for i in range(99999) %}{{ range(99999)|map('upper')|join|length }}{% endfor %}", LIMIT),
    "macro that calls itself": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "too deeply"),
    "macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", LIMIT),
    "recursive loop": (
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}", "too deeply"),
    "long text": ("{{ 'a' * 10**10 }}", "too much memory"),
    "long list": ("{{ ([0] * 10**10)|length }}", "too much memory"),
    "long number": ("{{ 10**(10**10) }}", LIMIT),
    "text that doubles": (GROW + "{% set n.v = n.v + n.v %}{% endfor %}", LIMIT),
    "lists that hold themselves twice": (
        GROW + "{% set n.v = [n.v, n.v] %}{% endfor %}{{ n.v }}", LIMIT),
    "output without end": ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", LIMIT),
    "strip of many characters": ("{{ ('a' * 10**6).strip('b' * 10**6 + 'a') }}", LIMIT),
    "membership in a long list": (
        "{% set long = range(100000, 200000)|list %}{{ range(100000)|select('in', long)|list|length }}", LIMIT),
    "wide format": ("{{ '%999999999d' % 1 }}", "too much memory"),
    "str.format": ("{{ '{:>999999999}'.format(1) }}", "too much memory"),
    "ljust": ("{{ 'a'.ljust(10**9) }}", "too much memory"),
    "indented JSON": ("{{ messages|tojson(indent=10**9) }}", "too much memory"),
    "division by zero": ("{{ 1 / 0 }}", "division by zero"),
    "undefined name": ("{{ x.y.z }}", "'x' is undefined"),
    "no Jinja": ("{% if %}", "Expected an expression"),
    "a refusal": ("{{ raise_exception('no system turn') }}", "no system turn"),
    "what is not to be changed": ("{{ messages.clear() }}", "unsafe"),
    "a wrong type": ("{{ 1 + 'a' }}", "unsupported operand"),
    "an import": ("{% import 'os' as os %}{{ os }}", "no loader"),
    "an include": ("{% include '/etc/passwd' %}", "no loader"),
    "nothing": ("", "writes nothing"),
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_typed_errors(name: str, short_patience: None) -> None:
    source, says = HOSTILE[name]
    with pytest.raises(TokenizerError, match=rf"^chat template: .*({says})"):
        ChatTemplate(source, NAMES).render_segments(USER)


DEEP = {
    "brackets": "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
    "lists": "{{ " + "[" * 20_000 + "]" * 20_000 + " }}",
    "sums": "{{ " + "1 + " * 10_000 + "1 }}",
    "ifs": "{% if true %}" * 2000 + "{% endif %}" * 2000,
    "fors": "{% for i in [1] %}" * 25 + "{% endfor %}" * 25,
    "long": " " * (template.MAX_SOURCE + 1),
    "much": "{{ x }}" * 20_000,
}


@pytest.mark.parametrize("name", DEEP)
def test_deep_and_long_templates(name: str) -> None:
    with pytest.raises(TokenizerError, match=r"^chat template: (no valid Jinja template: |expected at most 65536)"):
        ChatTemplate(DEEP[name], NAMES)


def test_one_long_call_into_c(short_patience: None) -> None:
    """Quadratic in the message's distinct characters, and deaf to everything but the system."""
    content = "".join(chr(0x4E00 + index) for index in range(20_000))
    with pytest.raises(TokenizerError, match=r"it takes more than 0\.16 s of CPU time"):
        ChatTemplate("{{ messages[0].content.encode('punycode') }}", NAMES).render_segments(
            [{"role": "user", "content": content}]
        )


def test_much_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "MAX_WRITTEN", 2**16)
    with pytest.raises(TokenizerError, match=r"it writes more than 6\d{4} bytes"):
        ChatTemplate("{{ 'a' * 70000 }}", NAMES).render_segments(USER)
    assert ChatTemplate("{{ 'a' * 7 }}", NAMES).render_segments(USER)[0].text == "a" * 7


def test_the_process_is_not_shared_with_a_fork() -> None:
    """Two that read one pipe would get each other's prompts."""
    rendered = ChatTemplate("{{ messages[0].content }}", NAMES)
    rendered.render_segments(USER)
    child = os.fork()
    if not child:
        good = all(rendered.render_segments([{"role": "user", "content": f"child {i}"}])[0].text == f"child {i}"
                   for i in range(200))  # fmt: skip
        renderer.close()
        os._exit(0 if good else 1)
    texts = [rendered.render_segments([{"role": "user", "content": f"{i}"}])[0].text for i in range(200)]
    assert texts == [f"{i}" for i in range(200)]
    assert os.waitpid(child, 0)[1] == 0


def test_threads_share_the_process() -> None:
    rendered = ChatTemplate("{{ messages[0].content }}", NAMES)

    def render(index: int) -> str:
        return rendered.render_segments([{"role": "user", "content": f"{index}" * 1000}])[0].text

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(render, range(100))) == [f"{index}" * 1000 for index in range(100)]


def test_special_names_with_many_first_characters() -> None:
    names = [chr(0x4E00 + index) + "x" for index in range(256)]
    content = "".join(names)
    segments = ChatTemplate("{{ messages[0].content }}" + names[200], names).render_segments(
        [{**USER[0], "content": content}]
    )
    assert [(segment.text, segment.markup) for segment in segments] == [(content, False), (names[200], True)]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize("style", ChatStyle)
def test_deep_values_in_messages_and_tools(style: ChatStyle) -> None:
    deep = nested(50_000)
    calls = [{"id": "x", "function": {"name": "f", "arguments": deep}}]
    with pytest.raises(TokenizerError, match="too deeply"):
        apply_chat_template([*USER, {"role": "assistant", "tool_calls": calls}], style=style)
    with pytest.raises(TokenizerError, match="too deeply"):
        apply_chat_template(
            USER, tools=[{"type": "function", "function": {"name": "f", "parameters": deep}}], style=style
        )


def test_deep_json_in_a_call() -> None:
    arguments = '{"a":' * 100_000 + "1" + "}" * 100_000
    message = parse_message(section(call(arguments=arguments), call("3", arguments)), tools=[tool("f"), tool("g")])
    assert as_tuples(message) == [("functions.f:0", "f", arguments)]
    assert message.content == "3" + arguments
    history = [*USER, parse_message(section(call(arguments=arguments))).to_openai()]
    assert arguments in apply_chat_template(history)


def test_many_required_names() -> None:
    names = [f"n{number}" for number in range(40_000)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    begun = time.process_time()
    assert typescript_declaration([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    assert time.process_time() - begun < 5


def test_long_names() -> None:
    name = "n" * 5000
    number = f"functions.f:{'9' * 5000}"
    assert number in apply_chat_template([*USER, {"role": "tool", "tool_call_id": number, "content": "x"}])
    message = parse_message(section(call(f"functions.{name}:0"), call(name * 40)), tools=[tool(name, "a")])
    assert [found.name for found in message.tool_calls] == [name]
    assert message.content == name * 40 + '{"a": 1}'
    text = apply_chat_template([*USER, message.to_openai()], tools=[tool(name)], style="k2.5")
    assert f"type {name} = (_: {{}}) => any;" in text
    with pytest.raises(TokenizerError) as caught:
        apply_chat_template([{"role": name, "content": "x"}])
    assert len(str(caught.value)) < 300


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "name", "tool_calls", "function", "arguments", "id",
                         "tool_call_id", "properties", "anyOf", "$ref", "$defs", "enum", "items", "x"]), inner,
        max_size=4),
    max_leaves=12,
)  # fmt: skip
ROLE = st.sampled_from(["system", "developer", "user", "assistant", "tool", "x"])


@given(st.lists(st.dictionaries(st.sampled_from(["content", "name", "tool_calls", "tool_call_id"]), ANY), max_size=3),
       ROLE, ANY, st.sampled_from(ChatStyle))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_any_messages_and_tools_render_or_are_typed_errors(
    messages: list[dict[str, Any]], role: str, schema: Any, style: ChatStyle
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    try:
        text = apply_chat_template([{**message, "role": role} for message in messages], tools=tools, style=style)
    except TokenizerError:
        return
    json.dumps(text)


@given(st.text(alphabet="{}%#- \n'\"[]().|~+*<>a1", max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_template_renders_or_is_a_typed_error(source: str) -> None:
    try:
        ChatTemplate(source, NAMES).render_segments(USER)
    except TokenizerError:
        return
