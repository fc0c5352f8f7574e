"""How answers are shown: as they are made on a terminal, as the model's own text in a pipe, or as JSON lines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
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
            line["logprobs"] = {"content": [self._logprob(*one) for one in reply.logprobs]}
        say(json.dumps(line, ensure_ascii=False))

    def _logprob(self, token: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        """A token's, as OpenAI's API gives them."""
        top = [{"token": self._tokenizer.decode([one]), "logprob": value} for one, value in logprobs.top]
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

    def _write(self, part: str, text: str, style: str | None = None) -> None:
        if self._part is None:
            text = text.lstrip("\n")
        if not text:
            return
        if part != self._part and self._part is not None:
            self._console.print("\n")
        self._part = part
        shown = Text(text, style=style or "")
        self._console.print(shown, end="", soft_wrap=True)


class PanelsView(View):
    """Several replies on a terminal, each in a panel that grows."""

    def __init__(self, console: Console, titles: list[str]) -> None:
        self._console, self._titles = console, titles
        self._texts = [Text() for _ in titles]
        self._live = Live(console=console, transient=True, refresh_per_second=8, vertical_overflow="ellipsis")

    def show(self, row: int, reply: Reply, deltas: list[Delta]) -> None:
        """Let a panel grow."""
        for delta in deltas:
            match delta:
                case Reasoning(text):
                    self._texts[row].append(text, REASONING)
                case Content(text):
                    self._texts[row].append(text)
                case ToolCallStart(_, _, name):
                    self._texts[row].append(f"\n→ {name} ", TOOL)
                case ToolCallArguments(_, text):
                    self._texts[row].append(text, TOOL)
        self._live.start()
        self._live.update(self._panels())

    def ended(self, row: int, reply: Reply) -> None:
        """Draw a reply anew as it was parsed in the end."""
        self._texts[row] = message_text(reply.message)
        self._live.update(self._panels())

    def close(self, replies: dict[int, Reply]) -> None:
        """Leave all panels on the screen, whole."""
        self._live.stop()
        self._console.print(self._panels())

    def _panels(self) -> Group:
        pairs = zip(self._titles, self._texts, strict=True)
        return Group(*(Panel(text, title=Text(title), title_align="left") for title, text in pairs))


def message_text(message: AssistantMessage) -> Text:
    """A whole message with reasoning and tool calls apart."""
    parts = []
    if message.reasoning_content:
        parts.append(Text(message.reasoning_content.strip(), REASONING))
    if message.content:
        parts.append(Text(message.content.strip("\n")))
    parts += [Text(f"→ {call.name} {call.arguments}", TOOL) for call in message.tool_calls]
    return Text("\n\n").join(parts)
