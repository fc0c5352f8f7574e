"""A Jinja chat template, rendered as transformers renders it; only what it writes itself can be a special token."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_k2.errors import TokenizerError
from kimi_k2.files import is_there, read_text
from kimi_k2.limits import TOKENIZER_BYTES
from kimi_k2.tokenization.config_file import TokenizerConfig
from kimi_k2.tokenization.messages import Message, normalized, plain_data
from kimi_k2.tokenization.renderer import MAX_SECONDS, render
from kimi_k2.tokenization.special_tokens import THINK, VIDEO_PLACEHOLDER
from kimi_k2.tokenization.style import ChatStyle
from kimi_k2.tokenization.tool_declaration import checked_tools, typescript_declaration

TEMPLATE_NAME = "chat_template.jinja"
MAX_SOURCE = 2**16

# Its few messages take a published template milliseconds.
_PROBE_SECONDS = 0.25
# A conversation of which every style writes something else.
_PROBE: list[Message] = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b", "reasoning_content": "why"},
    {"role": "user", "content": "c"},
]


@dataclass(frozen=True)
class Segment:
    """A piece of a rendered conversation; only markup may contain special tokens."""

    text: str
    markup: bool


class ChatTemplate:
    """A compiled template.

    A special token's name in the prompt counts as that token only where every character of it comes from the template's
    source, from one of its variables for special tokens, or from a message's role; see `rendering`.

    Args:
        source: Jinja source.
        special_names: names of the special tokens that the template may write.
        origin: what errors call the template.
        variables: special tokens that it is given by name (`bos_token` ...).

    Raises:
        TokenizerError: it is too long, or no valid Jinja.
    """

    def __init__(
        self,
        source: str,
        special_names: Collection[str],
        origin: str = "chat template",
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._source, self._origin, self._variables = source, origin, dict(variables or {})
        if len(source) > MAX_SOURCE:
            raise TokenizerError(f"{origin}: expected at most {MAX_SOURCE} characters, got {len(source)}")
        try:
            render(source)
        except TokenizerError as error:
            raise TokenizerError(f"{origin}: no valid Jinja template: {error}") from None
        self._names = sorted({*special_names, VIDEO_PLACEHOLDER}, key=len, reverse=True)

    @classmethod
    def from_pretrained(cls, directory: str | Path, config: TokenizerConfig) -> ChatTemplate | None:
        """The template in `chat_template.jinja`, else in `tokenizer_config.json`; None if the checkpoint has none.

        Raises:
            TokenizerError: it is no text or no valid Jinja; the message names the file.
        """
        path = Path(directory) / TEMPLATE_NAME
        source, origin = config.chat_template, f"{config.file}: chat_template"
        if is_there(path):
            try:
                source, origin = read_text(path, TOKENIZER_BYTES, TokenizerError), str(path)
            except FileNotFoundError:
                raise TokenizerError("a link to a file that is not there", file=path) from None
        return None if source is None else cls(source, config.names, origin, config.variables)

    def style(self) -> ChatStyle | None:
        """The style of what the template writes: where it writes <think>; None if it refuses a plain conversation."""
        try:
            segments = self.render_segments(_PROBE, seconds=_PROBE_SECONDS)
        except TokenizerError:
            return None
        markup = [segment.text for segment in segments if segment.markup]
        if markup and markup[-1] == THINK:
            return ChatStyle.K27 if any("why" in segment.text for segment in segments) else ChatStyle.K25
        return ChatStyle.THINKING if THINK in markup else ChatStyle.INSTRUCT

    def reads(self, name: str) -> bool:
        """Whether the source names a variable."""
        return re.search(rf"\b{name}\b", self._source) is not None

    def render_segments(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        style: ChatStyle | str = ChatStyle.INSTRUCT,
        thinking: bool | None = None,
        preserve_thinking: bool | None = None,
        seconds: float = MAX_SECONDS,
    ) -> list[Segment]:
        """Render a conversation.

        Args:
            messages: OpenAI-style; see `messages.normalized`.
            tools: OpenAI-style tool definitions.
            add_generation_prompt: end with the opening of an assistant turn.
            style: decides only whether the template is given the TypeScript form of the tools (K2.5).
            thinking: for K2.5: whether the model is to reason; None: as the template has it, which is yes.
            preserve_thinking: keep the reasoning of every turn (K2.6), not only of those since the last answer; None:
                as the template has it.
            seconds: CPU time that rendering may take, where that is less than `renderer.MAX_SECONDS`.

        Returns:
            Markup and text, alternating freely; their concatenation is the prompt.

        Raises:
            TokenizerError: naming the message and field, or the tool, that is malformed, or what the template refuses.
        """
        try:
            definitions = plain_data(checked_tools(tools), "tools")
            variables: dict[str, Any] = {
                "messages": normalized(messages),
                "tools": definitions or None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
            typescript = typescript_declaration(definitions) if ChatStyle(style).is_k25 else None
        except RecursionError:
            raise TokenizerError("messages or tools: nested too deeply") from None
        # What the caller leaves open is not there, as in transformers.
        options = {"thinking": thinking, "preserve_thinking": preserve_thinking, "tools_ts_str": typescript}
        variables |= {name: value for name, value in options.items() if value is not None}
        try:
            pieces = render(self._source, variables, own=self._variables, names=self._names, seconds=seconds)
        except TokenizerError as error:
            raise TokenizerError(f"{self._origin}: cannot be rendered: {error}") from None
        if messages and not pieces:
            raise TokenizerError(f"{self._origin}: writes nothing of {len(messages)} messages")
        return [Segment(*piece) for piece in pieces]
