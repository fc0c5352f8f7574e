"""Chat templates beside transformers' `apply_chat_template`: every construct that it takes, drawn ones, and our own.

KIMI_K2_DRAWS=2000 draws so many, each with a conversation of its own, and prints how many are rendered.
KIMI_K2_PUBLISHED_TEMPLATES names a directory with copies of the published ones, as COPIES' name and `.jinja`: ours are
held against them. Copies of K2-Thinking from before its template was mended differ in two names; that of K2-Instruct
also numbers the calls itself. K2.5 has the template of K2.6 but for preserve_thinking.
"""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from drawn_templates import MESSAGE_TOKENS, NAMED, TEMPLATE_TOKENS, drawn_conversation, drawn_template

from kimi_k2.errors import TokenizerError
from kimi_k2.tokenization.chat import built_in_template, template_source
from kimi_k2.tokenization.messages import normalized
from kimi_k2.tokenization.special_tokens import special_tokens
from kimi_k2.tokenization.style import ChatStyle
from kimi_k2.tokenization.template import ChatTemplate, Segment
from kimi_k2.tokenization.tool_declaration import checked_tools, typescript_declaration

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
    "{% if true %}\nx\n{% endif %}\ny\n", "a\n   {% if true %}x{% endif %}\n\t{# note #}\nb",
    "{% for m in [t, t] %}\n  {% if loop.first %}{% continue %}{% endif %}\n{{ m }}\n{% endfor %}",
    "{{ tools|tojson }}{{ tools|tojson(indent=2) }}{{ m|tojson(sort_keys=true) }}",
    "{% autoescape true %}{{ t }}{% endautoescape %}", "{{ documents is none }}{{ thinking is defined }}{{ t }}",
]  # fmt: skip


@pytest.mark.parametrize("construct", CONSTRUCTS)
def test_constructs(tokenizer: Any, construct: str) -> None:
    source = "{% for m in messages %}{% set t = m.content %}" + construct + "{% endfor %}"
    messages = [{"role": "user", "content": CONTENT}]
    tools = [{"function": {"description": "<é>'", "name": "f"}, "type": "function"}]
    segments = ours(source, messages, tools)
    expected = theirs(tokenizer, source, messages, tools, add_generation_prompt=True)
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


# Uses what real templates use: macros, namespaces, loop controls, slices, trimming, JSON with separators.
THINKING = """
{%- macro text(content) -%}
  {%- if content is string %}{{ content }}{% elif content is not none -%}
    {%- for part in content %}{{ part.text }}{% endfor %}
  {%- endif %}
{%- endmacro -%}
{%- set last = namespace(answer=-1) -%}
{%- for i in range(messages | length - 1, -1, -1) -%}
  {%- if messages[i].role == 'assistant' and not messages[i].tool_calls -%}
    {%- set last.answer = i -%}
    {%- break -%}
  {%- endif -%}
{%- endfor -%}
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>
  {%- if tools_ts_str is defined %}{{ tools_ts_str }}{% else %}{{ tools | tojson(separators=(',', ':')) }}{% endif -%}
  <|im_end|>
{%- endif -%}
{%- if not messages or messages[0].role != 'system' -%}
  <|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot AI.<|im_end|>
{%- endif -%}
{%- for m in messages -%}
  <|im_{{ m.role if m.role in ('user', 'assistant') else 'system' }}|>{{ m.get('name') or m.role }}<|im_middle|>
  {%- if m.role == 'tool' -%}
## Return of {{ m.tool_call_id }}
{{ text(m.content) }}
  {%- elif m.role == 'assistant' -%}
    <think>{{ m.get('reasoning_content', '') if loop.index0 > last.answer else '' }}</think>{{ text(m.content) }}
    {%- if m.tool_calls -%}
      <|tool_calls_section_begin|>
      {%- for call in m.tool_calls -%}
        <|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
        {%- if call.function.arguments is string %}{{ call.function.arguments -}}
        {% else %}{{ call.function.arguments | tojson }}{% endif -%}
        <|tool_call_end|>
      {%- endfor -%}
      <|tool_calls_section_end|>
    {%- endif -%}
  {%- else -%}
    {{ text(m.content) }}
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif -%}
"""


class Copy(NamedTuple):
    repository: str
    commit: str
    path: str
    style: ChatStyle
    renamed: dict[str, str]


COPIES = {
    "k2.6": Copy(
        "paswans05/kite1.0", "ee33012cddfd5e4f5136f9583f8af9c84ff012da", "chat_template.jinja", ChatStyle.K25,
        {"<|kite_video_placeholder|>": "<|kimi_k25_video_placeholder|>"}),
    "thinking": Copy(
        "ggml-org/llama.cpp", "0c3c896ea80643608b4e961eec7e1efcd844e109",
        "models/templates/moonshotai-Kimi-K2-Thinking.jinja", ChatStyle.THINKING,
        {"media_start": "media_begin", "tojson()": "tojson(separators=(',', ':'))"}),
    "instruct": Copy(
        "ikawrakow/ik_llama.cpp", "3c54a451a4dc68a7c45f349af1c14641593def7b",
        "models/templates/Kimi-K2-Instruct.jinja", ChatStyle.INSTRUCT,
        {"media_start": "media_begin", "| tojson }}<|im_end|>": "| tojson(separators=(',', ':')) }}<|im_end|>",
         "<|im_end|>\n  {% endif %}": "<|im_end|>{%- endif -%}",
         "{%- set _ = tool_response_queue.ids.append(formatted_id) -%}": "",
         "{%- if tool_response_queue.ids -%}": "{%- if true -%}",
         "tool_response_queue.ids.pop(0)": "message.tool_call_id"}),
}  # fmt: skip
COPIES["k2.7"] = COPIES["k2.6"]._replace(style=ChatStyle.K27)  # which has preserve_thinking on
COPIES["k2.5"] = COPIES["k2.6"]._replace(
    renamed=COPIES["k2.6"].renamed | {"preserve_thinking | default(false)": "false"}
)


@pytest.mark.parametrize("name", [*ChatStyle, *(f"published {name}" for name in COPIES)])
def test_the_familys_template_on_drawn_conversations(tokenizer: Any, name: str) -> None:
    """It stands alone in transformers, and says what the published ones say."""
    copy = COPIES.get(name.removeprefix("published ")) if name.startswith("published ") else None
    style = ChatStyle(name) if copy is None else copy.style
    published = None if copy is None else published_template(name.removeprefix("published "))
    for seed in range(DRAWN if copy is None else int(os.environ.get("KIMI_K2_DRAWS", "200"))):
        draw = random.Random(seed)
        messages, tools = drawn_conversation(seed)
        for message in messages if copy is not None or seed % 2 else ():
            if isinstance(message["content"], list):
                kinds = ["image", "image_url", "video"] if style.is_k25 else ["image", "image_url"]
                message["content"].insert(draw.randint(0, 1), {"type": (kind := draw.choice(kinds)), kind: "x"})
        options: dict[str, Any] = {"add_generation_prompt": draw.random() < 0.7}
        if style.is_k25:
            options["thinking"] = draw.choice([None, True, False])
            options["preserve_thinking"] = None if name.endswith("k2.5") and copy else draw.choice([None, True, False])
        segments = built_in_template(style).render_segments(messages, tools=tools, style=style, **options)
        if published is not None:
            if style is ChatStyle.K27 and options["preserve_thinking"] is None:
                options["preserve_thinking"] = True
            assert segments == published.render_segments(messages, tools=tools, style=style, **options), (
                seed,
                messages,
            )
            continue
        said = {key: value for key, value in options.items() if value is not None}
        if style.is_k25 and (typescript := typescript_declaration(checked_tools(tools))) is not None:
            said["tools_ts_str"] = typescript
        given, text = (normalized(messages), checked_tools(tools)), "".join(segment.text for segment in segments)
        assert text == theirs(tokenizer, template_source(style), *given, **said), (seed, messages)
        if style is ChatStyle.THINKING and not seed % 2:
            assert text == theirs(tokenizer, THINKING, *given, **said), (seed, messages)
            assert segments == ours(THINKING, messages, tools, **options)


def published_template(name: str) -> ChatTemplate:
    directory, copy = os.environ.get("KIMI_K2_PUBLISHED_TEMPLATES"), COPIES[name]
    if directory is None:
        pytest.skip(f"KIMI_K2_PUBLISHED_TEMPLATES is not set: {copy.repository}@{copy.commit}:{copy.path}")
    source = (Path(directory) / f"{'k2.6' if copy.style.is_k25 else name}.jinja").read_text()
    for old, new in copy.renamed.items():
        assert old in source
        source = source.replace(old, new)
    return ChatTemplate(source, SPECIAL)
