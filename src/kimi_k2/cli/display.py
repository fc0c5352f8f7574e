"""How answers are shown: as they are made on a terminal, as the model's own text in a pipe, or as JSON lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from kimi_k2.engine.reply import Reply
from kimi_k2.engine.sampler import TokenLogprobs
from kimi_k2.terminal import say
from kimi_k2.tokenization.deltas import (
    AssistantMessage,
    Content,
    Delta,
    Reasoning,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)

if TYPE_CHECKING:
    from kimi_k2.api import Prompt
    from kimi_k2.tokenization.tokenizer import KimiTokenizer

REASONING, TOOL = "dim italic", "cyan"


class View:
    """What `generate` shows its replies in."""

    def show(self, row: int, reply: Reply, deltas: list[Delta]) -> None:
        """A reply has grown."""

    def ended(self, row: int, reply: Reply) -> None:
        """A reply is complete."""

    def close(self, replies: dict[int, Reply]) -> None:
        """All are complete, or an error ended them."""


class PlainView(View):
    """The text as the model wrote it, markup included: of one reply as it comes, of several at the end."""

    def __init__(self, count: int) -> None:
        self._single = count == 1
        self._shown = 0

    def show(self, row: int, reply: Reply, deltas: list[Delta]) -> None:
        """Print what is new of a single reply."""
        if self._single:
            say(reply.text[self._shown :], nl=False)
            self._shown = len(reply.text)

    def close(self, replies: dict[int, Reply]) -> None:
        """Print several replies in the order of their prompts."""
        if self._single and replies:
            say()
        for row, reply in sorted(replies.items() if not self._single else ()):
            say(f"--- {row}\n{reply.text}")


class JsonView(View):
    """A JSON line a reply when it ends."""

    def __init__(self, prompts: list[Prompt], tokenizer: KimiTokenizer) -> None:
        self._prompts, self._tokenizer = prompts, tokenizer

    def ended(self, row: int, reply: Reply) -> None:
        """Print the message."""
        usage = {"prompt_tokens": len(self._prompts[row].ids), "completion_tokens": reply.tokens}
        line = {
            "index": row,
            "message": reply.message.to_openai(),
            "finish_reason": reply.finish_reason,
            "usage": usage,
        }
        if reply.logprobs:
            line["logprobs"] = {"content": [self._logprob(*token) for token in reply.logprobs]}
        say(json.dumps(line, ensure_ascii=False))

    def _logprob(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """A token's, as OpenAI's API gives them."""
        top = [{"token": self._tokenizer.decode([likely]), "logprob": value} for likely, value in logprobs.top]
        return {"token": self._tokenizer.decode([token]), "logprob": logprobs.chosen, "top_logprobs": top}


class TerminalView(View):
    """One reply on a terminal: reasoning dimmed, tool calls marked, text as it is made."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._part: str | None = None

    def show(self, row: int, reply: Reply, deltas: list[Delta]) -> None:
        """Print what came."""
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    self._write("reasoning", text, REASONING)
                case Content(text):
                    self._write("content", text)
                case ToolCallStart(index, _, name):
                    self._write(f"call {index}", f"→ {name} ", f"bold {TOOL}")
                case ToolCallArguments(index, text):
                    self._write(f"call {index}", text, TOOL)
                case ToolCallEnd(index, complete):
                    self._write(f"call {index}", "" if complete else " (cut off)", "yellow")

    def ended(self, row: int, reply: Reply) -> None:
        """End the last line."""
        self._console.print()

    def _write(self, block: str, text: str, style: str | None = None) -> None:
        if self._part is None:
            text = text.lstrip("\n")
        if not text:
            return
        if block != self._part and self._part is not None:
            self._console.print("\n")
        self._part = block
        shown = Text(text, style=style or "")
        self._console.print(shown, end="", soft_wrap=True)


class PanelsView(View):
    """Several replies on a terminal, each in a panel when it ends."""

    def __init__(self, console: Console, titles: list[str]) -> None:
        self._console, self._titles = console, titles

    def ended(self, row: int, reply: Reply) -> None:
        """Draw a reply."""
        title = Text(self._titles[row])
        self._console.print(Panel(message_text(reply.message), title=title, title_align="left"))


def message_text(message: AssistantMessage) -> Text:
    """A whole message with reasoning and tool calls apart."""
    paragraphs = []
    if message.reasoning_content:
        paragraphs.append(Text(message.reasoning_content.strip(), REASONING))
    if message.content:
        paragraphs.append(Text(message.content.strip("\n")))
    paragraphs += [Text(f"→ {call.name} {call.arguments}", TOOL) for call in message.tool_calls]
    return Text("\n\n").join(paragraphs)
