"""The built-in chat template of the Kimi-K2 family, for checkpoints without one of their own.

It is one Jinja source for all styles, rendered like a checkpoint's own, and written into synthetic checkpoints.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from kimi_k2.files import replace_file
from kimi_k2.tokenization.special_tokens import NAMED
from kimi_k2.tokenization.style import ChatStyle
from kimi_k2.tokenization.template import TEMPLATE_NAME, ChatTemplate

DEFAULT_SYSTEM = "You are Kimi, an AI assistant created by Moonshot AI."
_SOURCE = Path(__file__).with_name("family.jinja")


@cache
def built_in_template(style: ChatStyle) -> ChatTemplate:
    """The compiled template of a style."""
    return ChatTemplate(template_source(style), NAMED.values(), f"built-in template '{style.value}'")


def template_source(style: ChatStyle) -> str:
    """Jinja source of a style's template; it stands alone, as a checkpoint's `chat_template.jinja`."""
    settings = {"style": style.value, "default_system": DEFAULT_SYSTEM}
    lines = [f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in settings.items()]
    return "".join(lines) + _SOURCE.read_text(encoding="utf-8")


def write_chat_template(directory: Path, style: ChatStyle) -> None:
    """Write a style's template as the checkpoint's own."""
    replace_file(directory / TEMPLATE_NAME, template_source(style))
