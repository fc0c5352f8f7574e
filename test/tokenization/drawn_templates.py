"""Chat templates and conversations drawn at random, of all that transformers' environment has but randomness.

Special tokens in messages have other names than those in templates, whole and in pieces: so a name in a prompt tells
who wrote it.
"""

from __future__ import annotations

import random
import re
from typing import Any

TEMPLATE_TOKENS = ["<|im_user|>", "<|im_middle|>", "<|im_assistant|>", "<|im_system|>", "<|media_begin|>"]
MESSAGE_TOKENS = ["<|im_end|>", "[EOS]", "</think>", "<think>", "<|tool_call_end|>", "[PAD]"]
NAMED = {"bos_token": "[BOS]", "eos_token": "[EOT]", "unk_token": "[UNK]"}

_WORDS = [
    "a", "Hello world", " padded ", "x\ny\n", "\n", "", "<b>&'\"</b>", "é汉字ß", "one,two;three", "A-B_c", "3",
    "im_end",
    "|>", "<|", "%s {} {0}", "\\n", "İstanbul ŉ", "{{ x }}", "\ufeff\u2028z", "😀",
]  # fmt: skip
# In the tables below @ stands for an expression of text, ? for a condition, ~~ for a block and NAME for a new name.
_FILTERS = [
    "upper", "lower", "title", "capitalize", "trim", "string", "reverse", "safe", "escape", "e", "striptags",
    "urlencode", "forceescape", "indent", "indent(2, true)", "center(20)", "truncate(5)", "truncate(9, true, '')",
    "wordwrap(4)", "replace('a', '<|im_user|>')", "replace('</think>', '')", "replace('', '-', 2)", "tojson",
    "list|join", "list|join('<|im_middle|>')", "default('d')", "d('', true)", "first", "last", "pprint",
    "trim('<|')", "urlize", "xmlattr", "length", "wordcount", "int", "float",
]  # fmt: skip
_LISTS = [
    "list", "reverse|list", "sort", "unique|list", "map('upper')|list", "select('string')|list",
    "batch(2)|map('join')",
    "reject('in', ['a', 'x'])|list", "map('length')|map('string')", "slice(2)|map('join', '+')|list",
    "select('equalto', 'a')|list", "map('trim')|sort(reverse=true)",
]  # fmt: skip
_METHODS = [
    "upper()", "lower()", "title()", "capitalize()", "swapcase()", "casefold()", "strip()", "lstrip()", "rstrip()",
    "strip('<|>')", "rstrip('\\n')", "split('</think>')[-1]", "split('</think>')[0]", "split()|join('+')",
    "rsplit('a', 1)[0]", "rsplit(None, 1)[-1]", "split('|', 1)|join('|')", "partition('|')[2]", "zfill(8)",
    "rpartition('|')[0]", "splitlines()|join('/')", "splitlines(true)|last", "replace('a', 'bb')", "expandtabs(4)",
    "replace('a', '<|im_user|>', 1)", "removeprefix('<')", "removesuffix('>')", "ljust(12)", "rjust(12, '.')",
    "center(13, '*')", "join(['1', '2'])", "join(['<|im_user|>', 'z'])", "format('v')", "encode('utf-8')|length",
    "count('a')", "find('|')", "rfind('<')",
]  # fmt: skip
_SLICES = ["[0]", "[-1]", "[:6]", "[2:]", "[::-1]", "[1:9:2]", "[-4:]"]
_TESTS = [
    "is string", "is mapping", "is none", "is defined", "is iterable", "is sequence", "is upper", "is lower",
    "== 'a'",
    "is number", "in 'Hello world <|im_end|>'", "!= ''", "> 'b'", "is in ['a', '3']", "is eq 'a'", "is not none",
    "is boolean", "is callable", "is escaped",
]  # fmt: skip
_TEXTS = [
    "(@ ~ @)", "(@ ~ @)", "(@ + @)", "(@ if ? else @)", "(@ or @)", "@ * 2",
    *[f"@|{name}" for name in _FILTERS],
    *[f"@.{name}" for name in _METHODS],
    *[f"@{name}" for name in _SLICES * 2],
    *[f"[@, @, 'x']|{name}|{last}" for name in _LISTS for last in ("join", "first", "join(', ')", "tojson")],
    "'%s|%s' % (@, @)", "'<|im_user|>%s %r' % (@, @)", "'%5.2s%-4s' % (@, @)", "'%(a)s' % {'a': @}",
    "'<|{}|>{:>4}'.format(@, @)", "'%s<|im_user|>'|format(@)", "'{a}{a!r}'.format(a=@)", "{'k': @}", "(@, 1)",
    "[@, 1]",
    "dict(a=@).a", "{'a': @}['a']", "bos_token", "(eos_token ~ 'z')", "strftime_now('%Y')", "[3, 1, 2]|sum", "none",
    "3.7|round|int", "(7 // 2)", "2 ** 5", "range(3)|list", "messages|length", "messages[0]['role']", "true",
    "messages[-1].content", "sep_token", "messages|map(attribute='role')|join(',')",
    "(messages|groupby('role'))[0][0]",
    "messages|selectattr('role', 'eq', 'user')|list|length", "messages[0]|dictsort|first|first", "none[:6]",
]  # fmt: skip
_CONDITIONS = [
    "(not ? and ?)", "(? or ?)", "'</think>' in @", "'<|im_end|>' in @", "'<|im_user|>' in @", "@|length > 3",
    "@.startswith('<')", "@.endswith('|>')", "@|trim",
    *[f"@ {name}" for name in _TESTS],
]  # fmt: skip
_BLOCKS = [
    "{{ @ }}", "{{- @ -}}\n", "text\n", "  ", "{# note #}\n", *TEMPLATE_TOKENS, "{% set NAME = @ %}~~",
    "{% set NAME %}<|im_user|>{{ @ }}{% endset %}~~", "{%- if ? %}\n~~{% elif @ %}~~{% else %}e{% endif %}",
    "{% for NAME in @ %}{{ NAME }}{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}",
    "{% macro NAME(a, b='<|im_user|>') %}{{ a }}{{ b }}{% endmacro %}{{ NAME(@) }}",
    "{% macro NAME(a) %}[{{ caller() }}{{ a }}]{% endmacro %}{% call NAME(@) %}~~{% endcall %}",
    *[f"{{% filter {name} %}}~~{{% endfilter %}}" for name in ("upper", "trim", "indent", "reverse", "length")],
    "{% set NAME = namespace(a=@) %}{% set NAME.a = NAME.a ~ 'z' %}{{ NAME.a }}",
    "{% generation %}~~{% endgeneration %}", "{% with NAME = @ %}~~{% endwith %}",
    "{% raw %}{{ raw }}<|im_user|>{% endraw %}", "{% autoescape true %}{{ @ }}{% endautoescape %}",
    "{% if ? and ? and ? %}{{ raise_exception('no') }}{% endif %}",
]  # fmt: skip
_HEADS = [
    "<|im_user|>{{ m.role }}<|im_middle|>", "<|im_{{ m.role }}|>", "{{ '<|im_' ~ m['role'] + '|>' }}",
    "{{ bos_token }}",
    "[{{ loop.index }}/{{ loop.length }}] ", "{%- if loop.first %}{% continue %}{% endif %}",
    "{{ loop.cycle('a', 'b') }}",
]  # fmt: skip
_TAILS = [
    "", "", "{% if add_generation_prompt %}<|im_assistant|>assistant{{ eos_token }}{% endif %}",
    "{% if tools %}{{ tools|tojson(separators=(',', ':')) }}{{ tools[0].function.name }}{% endif %}",
]  # fmt: skip
_MARK = re.compile(r"@|\?|~~|NAME")


def drawn_template(seed: int) -> str:
    """Source of a template that goes over the messages."""
    return _Draw(seed).template()


class _Draw:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = 0

    def template(self) -> str:
        pick, some = self._random.choice, self._random.randint
        before = "".join(self._filled(pick(_BLOCKS), 1, ["messages[0].role"]) for _ in range(some(0, 2)))
        fields = ["m.content", "m.role", "m['content']", "m.get('name', 'n')"]
        body = "".join(self._filled(pick(_BLOCKS), 0, fields) for _ in range(some(1, 3)))
        end = pick(["", "<|im_middle|>", "\n"])
        return f"{before}{{% for m in messages %}}{pick(_HEADS)}{body}{end}{{% endfor %}}{pick(_TAILS)}"

    def _filled(self, form: str, depth: int, names: list[str]) -> str:
        """A form with everything drawn that it leaves open; what it names can be used inside."""
        self._count += 1
        name = f"v{self._count}"
        inside = [*names, name] if "set NAME" in form or "with NAME" in form else names

        def drawn(mark: re.Match[str]) -> str:
            if mark[0] == "NAME":
                return name
            if mark[0] == "@":
                return self._text(depth + 1, names)
            if mark[0] == "?":
                return self._filled(self._random.choice(_CONDITIONS if depth < 5 else ["true"]), depth + 1, names)
            return self._filled(self._random.choice(_BLOCKS if depth < 3 else ["{{ @ }}"]), depth + 1, inside)

        return _MARK.sub(drawn, form)

    def _text(self, depth: int, names: list[str]) -> str:
        pick = self._random.choice
        if depth > 5 or not pick(range(3)):
            return pick([pick(names), pick(names), repr(pick(_WORDS + TEMPLATE_TOKENS))])
        text = self._filled(pick(_TEXTS), depth, names)
        # Mostly made text, so that most templates render: a few fail on both sides.
        return f"(({text})|string)" if pick(range(15)) else f"({text})"


def drawn_conversation(seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Messages, with tool calls in the form that Kimi was trained on, and tools."""
    draw = random.Random(seed)

    def text() -> str:
        return "".join(draw.choice(_WORDS + MESSAGE_TOKENS * 2) for _ in range(draw.randint(0, 4)))

    messages: list[dict[str, Any]] = []
    calls = 0
    for _ in range(draw.randint(1, 5)):
        role = draw.choice(["system", "user", "user", "assistant", "tool", "developer"])
        message: dict[str, Any] = {"role": role, "content": text()}
        if draw.random() < 0.2:
            message["content"] = [{"type": "text", "text": text()} for _ in range(draw.randint(1, 2))]
        if draw.random() < 0.2:
            message["name"] = text()
        if role == "assistant":
            if draw.random() < 0.5:
                message[draw.choice(["reasoning_content", "reasoning", "thinking"])] = text()
            if draw.random() < 0.4:
                arguments = draw.choice([{"a": text(), "n": 3, "t": None}, text()])
                call = {"name": "f", "arguments": arguments}
                message["tool_calls"] = [{"id": f"functions.f:{calls}", "type": "function", "function": call}]
                calls += 1
            if draw.random() < 0.3:
                message["content"] = None
        if role == "tool":
            message["tool_call_id"] = f"functions.f:{draw.randint(0, calls - 1)}" if calls else "functions.f:0"
            calls = max(calls, 1)
        messages.append(message)
    parameters = {"properties": {"a": {"description": text(), "type": "string"}}, "type": "object"}
    function = {"description": text(), "name": "f", "parameters": parameters}
    return messages, draw.choice([None, [{"function": function, "type": "function"}]])
