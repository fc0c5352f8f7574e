"""Chat templates beside transformers' `apply_chat_template`: every construct that it takes, and drawn templates.

KIMI_K2_DRAWS=2000 draws so many, each with a conversation of its own, and prints how many are rendered.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
from drawn_templates import MESSAGE_TOKENS, NAMED, TEMPLATE_TOKENS, drawn_conversation, drawn_template

from kimi_k2.errors import TokenizerError
from kimi_k2.tokenization.special_tokens import special_tokens
from kimi_k2.tokenization.template import ChatTemplate, Segment

DRAWN = int(os.environ.get("KIMI_K2_DRAWS", "80"))
SPECIAL = special_tokens(1792)
# Why a template is refused that transformers renders: nothing would be left of the messages, or its special tokens went
# through what makes new text of old (`upper`, `tojson`, `sort`), so that nobody can say whose they are.
REFUSED = re.compile("writes nothing|whose they are|puts .* together")
ADDRESS = re.compile(r"\bat 0x[0-9a-f]+", re.IGNORECASE)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")), **NAMED)


def theirs(tokenizer: Any, source: str, messages: Any, tools: Any, **options: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, chat_template=source, tokenize=False, **options)
    except Exception as error:  # any: ours must not render it either
        return error


def ours(source: str, messages: Any, tools: Any, **options: Any) -> list[Segment]:
    return ChatTemplate(source, SPECIAL, variables=NAMED).render_segments(messages, tools=tools, **options)


def test_drawn_templates(tokenizer: Any) -> None:
    rendered = refused = 0
    for seed in range(DRAWN):
        source, (messages, tools) = drawn_template(seed), drawn_conversation(seed)
        expected = theirs(tokenizer, source, messages, tools, add_generation_prompt=bool(seed % 2))
        try:
            segments = ours(source, messages, tools, add_generation_prompt=bool(seed % 2))
        except TokenizerError as error:
            assert REFUSED.search(str(error)) or not isinstance(expected, str), (seed, source, error)
            refused += isinstance(expected, str)
            continue
        rendered += 1
        text = "".join(segment.text for segment in segments)
        assert ADDRESS.sub("", text) == ADDRESS.sub("", expected), (seed, source, messages)
        assert not any(segment.markup and segment.text in MESSAGE_TOKENS for segment in segments), (seed, source)
        lost = [name for segment in segments if not segment.markup for name in TEMPLATE_TOKENS if name in segment.text]
        assert not lost, (seed, source, lost)
    print(f"{rendered} of {DRAWN} drawn templates rendered, {refused} refused that transformers renders")
    assert rendered >= 0.55 * DRAWN


# `t` is the message's content: all special tokens, and more.
CONTENT = "".join(SPECIAL) + " old</think>new <|im_user|>é<b>&'\"\n two  words\tß"
CONSTRUCTS = [
    "{% if '</think>' in t %}{{ t.split('</think>')[-1] }}{% endif %}", "{{ t|upper }}", "{{ t|title }}", "{{ t[:6] }}",
    "{{ t[0] }}{{ t[-1] }}", "{{ t|reverse }}", "{{ t|truncate }}", "{{ t|truncate(20, true, '..', 0) }}",
    "{{ t|length }}", "{{ t == t }}{{ t == 'x' }}", "{{ t.startswith('[BOS]') }}{{ t is eq t }}",
    "{{ t|replace('<|im_end|>', '') }}", "{{ t|replace('<', '(') }}", "{{ t|e }}", "{{ t|safe }}",
    "{{ strftime_now('%Y') }}{{ t }}", "{{ 3.7|round }}{{ [1, 2]|sum }}", "{{ t|list|batch(3)|list|length }}{{ t }}",
    "{{ '%s!'|format(t) }}", "{{ '%s' % t }}", "{{ '{} {!r}'.format(t, t) }}", "{{ '{a}'.format_map({'a': t}) }}",
    "{{ t.ljust(9999)|trim }}", "{{ t.center(9999, '<')|length }}", "{{ t.zfill(9999)|length }}",
    "{% generation %}{{ t }}{% endgeneration %}", "{{ bos_token }}{{ t }}{{ eos_token }}{{ sep_token }}",
    "{{ t.partition('</think>')|join }}", "{{ t.rsplit('|', 3)|join('|') }}", "{{ t.splitlines(true)|join }}",
    "{{ t.split()|join(' ') }}", "{{ t.rsplit(none, 2)[0] }}", "{{ t|list|join }}",
    "{% for c in t %}{{ c }}{% endfor %}",
    "{{ t.strip('[]<>|') }}", "{{ t.removeprefix('[BOS]') }}", "{{ t.swapcase().swapcase() }}", "{{ t.casefold() }}",
    "{{ t.expandtabs(2) }}", "{{ t.translate({33: none}) }}", "{{ t|indent(2, true) }}", "{{ t|wordwrap(20) }}",
    "{{ t|tojson }}{{ m|tojson(indent=2) }}", "{{ m }}{{ m|pprint }}", "{{ m|dictsort }}", "{{ t|urlencode }}",
    "{{ t|striptags }}", "{{ t|string|first }}{{ t|max }}{{ t|list|unique|join }}", "{{ (t ~ t)|wordcount }}",
    "{% set x %}{{ t }}{% endset %}{{ x|trim }}", "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(t) }}",
    "{% filter lower %}{{ t }}{% endfilter %}", "{% set n = namespace(a=t) %}{{ n.a }}", "{{ dict(a=t).a }}",
    "{{ [t, 'z']|sort|join }}", "{{ {t: 1}[t] }}", "{{ '<|' ~ 'im_end' ~ t[:0] ~ '|>' }}{{ t }}", "{{ t * 2 }}",
    "{{ '<|im_user|>%s'|format(t) }}", "{{ '{}<|im_user|>'.format(t) }}", "{{ ('<|im_user|>\\n' ~ t)|indent }}",
    "{{ '<|im_user|>' + t + '<|im_user|>' }}", "{{ t.replace('two', '<|im_user|>') }}", "{{ '<|im_user|>' in t }}",
    "{% for m in messages|selectattr('role', 'eq', 'user') %}{{ m.content }}{% endfor %}",
    "{{ messages|map(attribute='content')|join(',') }}", "{{ t|default('d') }}{{ u is defined }}{{ u }}",
    "{% autoescape true %}{{ t }}{% endautoescape %}", "{{ documents is none }}{{ thinking is defined }}{{ t }}",
]  # fmt: skip


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_constructs(tokenizer: Any, construct: str) -> None:
    source = "{% for m in messages %}{% set t = m.content %}" + construct + "{% endfor %}"
    messages = [{"role": "user", "content": CONTENT}]
    segments = ours(source, messages, None)
    expected = theirs(tokenizer, source, messages, None, add_generation_prompt=True)
    assert "".join(segment.text for segment in segments) == expected
    # Markup is what the construct itself names, and no more of it than without the message.
    literal = construct.count("<|im_user|>") if "|im_user|>' in t" not in construct else 0
    names = ["<|im_user|>"] * literal + ["<|im_end|>"] * ("'im_end'" in construct)
    names += [NAMED[name] for name in ("bos_token", "eos_token") if name in construct]
    assert sorted(segment.text for segment in segments if segment.markup) == sorted(names)


def test_reasoning_has_the_names_that_templates_read(tokenizer: Any) -> None:
    source = "{% for m in messages %}{{ m|tojson }}{{ m.reasoning_content }}{{ m.thinking }}{{ m.content }}{% endfor %}"
    for field in ("reasoning_content", "thinking", "reasoning"):
        messages = [{"role": "assistant", "content": None, field: "why", "tool_calls": None}]
        segments = ours(source, messages, None)
        assert "".join(s.text for s in segments) == theirs(tokenizer, source, messages, None)
