"""The built-in templates beside public copies of the published ones, on drawn conversations.

KIMI_K2_PUBLISHED_TEMPLATES names a directory with the copies, as ROW's name and `.jinja`; KIMI_K2_DRAWS
says how many are drawn for each. Copies of K2-Thinking from before its template was mended differ in two names; that of
K2-Instruct also numbers the calls itself. K2.5 has the template of K2.6 but for preserve_thinking.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from drawn_templates import drawn_conversation

from kimi_k2.tokenization.chat import built_in_template
from kimi_k2.tokenization.special_tokens import special_tokens
from kimi_k2.tokenization.style import ChatStyle
from kimi_k2.tokenization.template import ChatTemplate


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


@pytest.mark.parametrize("name", COPIES)
def test_drawn_conversations(name: str) -> None:
    directory = os.environ.get("KIMI_K2_PUBLISHED_TEMPLATES")
    copy = COPIES[name]
    if directory is None:
        pytest.skip(f"KIMI_K2_PUBLISHED_TEMPLATES is not set: {copy.repository}@{copy.commit}:{copy.path}")
    source = (Path(directory) / f"{'k2.6' if copy.style.is_k25 else name}.jinja").read_text()
    for old, new in copy.renamed.items():
        assert old in source
        source = source.replace(old, new)
    published = ChatTemplate(source, special_tokens(1792))
    built_in = built_in_template(copy.style)
    for seed in range(int(os.environ.get("KIMI_K2_DRAWS", "200"))):
        draw = random.Random(seed)
        messages, tools = drawn_conversation(seed)
        for message in messages:
            if isinstance(message["content"], list):
                kinds = ["image", "image_url", "video"] if copy.style.is_k25 else ["image", "image_url"]
                message["content"].insert(draw.randint(0, 1), {"type": (kind := draw.choice(kinds)), kind: "x"})
        options: dict[str, Any] = {"tools": tools, "style": copy.style, "add_generation_prompt": draw.random() < 0.7}
        if copy.style.is_k25:
            options["thinking"] = draw.choice([None, True, False])
            options["preserve_thinking"] = None if name == "k2.5" else draw.choice([None, True, False])
        ours = built_in.render_segments(messages, **options)
        if copy.style is ChatStyle.K27 and options["preserve_thinking"] is None:
            options["preserve_thinking"] = True
        assert ours == published.render_segments(messages, **options), (seed, messages, options)
