"""A checkpoint's own Jinja chat template, rendered in a sandbox, with message text kept from forging markup."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from kimi_k2.errors import TokenizerError
from kimi_k2.files import is_there
from kimi_k2.tokenization.files import read_object, read_text
from kimi_k2.tokenization.messages import Message, normalized
from kimi_k2.tokenization.sandbox import MAX_SOURCE, BoundedEnvironment, bounded
from kimi_k2.tokenization.special_tokens import THINK, VIDEO_PLACEHOLDER
from kimi_k2.tokenization.style import ChatStyle
from kimi_k2.tokenization.tool_declaration import checked_tools, typescript_declaration

TEMPLATE_NAME = "chat_template.jinja"
CONFIG_NAME = "tokenizer_config.json"
MAX_INDENT = 16

# Its few messages take a published template milliseconds.
_PROBE_SECONDS = 0.25
# A conversation of which every style writes something else.
_PROBE: list[Message] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered conversation; only markup may contain special tokens."""

    text: str
    markup: bool


class ChatTemplate:
    """A compiled template with the environment that transformers gives it.

    Every character of message text that could begin a special token is replaced by a random mark before rendering and
    restored after it, so that its place in the prompt is known: a special token's name counts as that token only where
    the template itself wrote its first character.

    Args:
        source: Jinja source.
        special_names: names of the special tokens that the template may write.
        origin: what errors call the template.
    """

    def __init__(self, source: str, special_names: Collection[str], origin: str = "chat template") -> None:
        environment = BoundedEnvironment({"tojson": _to_json}, {"raise_exception": _raise_exception})
        self._origin = origin
        if len(source) > MAX_SOURCE:
            raise TokenizerError(f"{origin}: expected at most {MAX_SOURCE} characters, got {len(source)}")
        try:
            self._template = bounded(environment.from_string, source)
        except TokenizerError as error:
            raise TokenizerError(f"{origin}: no valid Jinja template: {error}") from None
        names = sorted({*special_names, VIDEO_PLACEHOLDER}, key=len, reverse=True)
        self._openings = "".join(sorted({name[0] for name in names}))
        self._special = re.compile("|".join(map(re.escape, names)))

    @classmethod
    def from_pretrained(cls, directory: str | Path, special_names: Collection[str]) -> ChatTemplate | None:
        """The template in `chat_template.jinja`, else in `tokenizer_config.json`; None if the checkpoint has none.

        Raises:
            TokenizerError: it is no text or no valid Jinja; the message names the file.
        """
        path = Path(directory) / TEMPLATE_NAME
        if is_there(path):
            return cls(read_text(path), special_names, str(path))
        path = Path(directory) / CONFIG_NAME
        source = read_object(path, "chat_template").get("chat_template") if is_there(path) else None
        if source is None:
            return None
        if not isinstance(source, str):
            raise TokenizerError(f"{path}: chat_template: expected Jinja source, got {type(source).__name__}")
        return cls(source, special_names, f"{path}: chat_template")

    def style(self) -> ChatStyle | None:
        """The style of what the template writes: where it writes <think>; None if it refuses a plain conversation."""
        try:
            markup = [
                segment.text for segment in self.render_segments(_PROBE, seconds=_PROBE_SECONDS) if segment.markup
            ]
        except TokenizerError:
            return None
        if markup and markup[-1] == THINK:
            return ChatStyle.K25
        return ChatStyle.THINKING if THINK in markup else ChatStyle.INSTRUCT

    def render_segments(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        style: ChatStyle | str = ChatStyle.INSTRUCT,
        thinking: bool = True,
        preserve_thinking: bool = False,
        seconds: float = math.inf,
    ) -> list[Segment]:
        """Render a conversation.

        Args:
            messages: OpenAI-style: `role` (system, developer, user, assistant, tool), `content` (text, None, or a list
                of text, image and video parts), for assistants `tool_calls` and `reasoning_content`, for tools
                `tool_call_id`, optionally `name`.
            tools: OpenAI-style tool definitions.
            add_generation_prompt: end with the opening of an assistant turn.
            style: decides only whether the template is given the TypeScript form of the tools (K2.5).
            thinking: for K2.5: whether the model is to reason.
            preserve_thinking: keep the reasoning of every turn (K2.6), not only of those since the last answer.
            seconds: CPU time that rendering may take, where that is less than `sandbox.MAX_SECONDS`.

        Returns:
            Markup and text, alternating freely; their concatenation is the prompt.

        Raises:
            TokenizerError: naming the message and field, or the tool, that is malformed, or what the template refuses.
        """
        hide = _Hider(self._openings, secrets.token_hex(8))
        try:
            definitions = checked_tools(tools)
            typescript = typescript_declaration(definitions) if ChatStyle(style) is ChatStyle.K25 else None
            variables: dict[str, Any] = {
                "messages": [_hide_message(message, hide) for message in normalized(messages)],
                "tools": hide(definitions) or None,
                "add_generation_prompt": add_generation_prompt,
                "thinking": thinking,
                "preserve_thinking": preserve_thinking,
            }
        except RecursionError:
            raise TokenizerError("messages or tools: nested too deeply") from None
        if typescript is not None:
            variables["tools_ts_str"] = hide(typescript)
        try:
            rendered = bounded(self._template.render, variables, characters=hide.characters, seconds=seconds)
        except TokenizerError as error:
            raise TokenizerError(f"{self._origin}: cannot be rendered: {error}") from None
        segments = self._segments(rendered, hide)
        if messages and not segments:
            raise TokenizerError(f"{self._origin}: writes nothing of {len(messages)} messages")
        return segments

    def _segments(self, rendered: str, hide: _Hider) -> list[Segment]:
        text, masked = hide.restored(rendered), hide.masked(rendered)
        segments: list[Segment] = []
        end = 0
        for match in self._special.finditer(masked):
            segments += [Segment(text[end : match.start()], False), Segment(match[0], True)]
            end = match.end()
        segments.append(Segment(text[end:], False))
        return [segment for segment in segments if segment.text]


class _Hider:
    """Replaces characters of strings, however nested, by marks that no filter or JSON encoder changes.

    Attributes:
        characters: how many it has made so far.
    """

    def __init__(self, characters: str, mark: str) -> None:
        self._marks = {ord(character): f"{mark}{number:03d}" for number, character in enumerate(characters)}
        self._found = re.compile(f"{mark}(\\d{{3}})")
        self._openings = characters
        self.characters = 0

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            hidden = value.translate(self._marks)
            self.characters += len(hidden)
            return hidden
        if isinstance(value, Mapping):
            return {self(key): self(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self(item) for item in value]
        return value

    def restored(self, rendered: str) -> str:
        return self._found.sub(lambda match: self._openings[int(match[1])], rendered)

    def masked(self, rendered: str) -> str:
        """As `restored`, place by place, with a character there that begins no special token."""
        return self._found.sub("\0", rendered)


def _hide_message(message: dict[str, Any], hide: Callable[[Any], Any]) -> dict[str, Any]:
    return {key: value if key == "role" else hide(value) for key, value in message.items()}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    if isinstance(indent, int) and not 0 <= indent <= MAX_INDENT:
        raise ValueError(f"tojson: expected an indent of 0 to {MAX_INDENT}, got {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
