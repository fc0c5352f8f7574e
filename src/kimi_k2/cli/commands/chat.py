"""`kimi-k2 chat`."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.conversation import read_messages, read_tools, user_message, with_system, write_conversation
from kimi_k2.cli.options import ChatSampling, Checkpoint, ModelOptions, PreserveThinking, Style, Thinking, with_groups
from kimi_k2.errors import GenerationError, KimiK2Error
from kimi_k2.files import Json
from kimi_k2.terminal import new_console, printable

if TYPE_CHECKING:
    from rich.console import Console

    from kimi_k2.api import KimiK2
    from kimi_k2.tokenization.deltas import ToolCall

OTHERWISE = {"max_new_tokens": 1024, "temperature": 0.6}
HELP = """\
/system TEXT   set the system prompt (without TEXT: show it)
/tools FILE    offer the tools of a JSON file (without FILE: none)
/image FILE    put a picture before the next message; may be repeated
/video FILE    the same for a film
/save FILE     write the conversation, for /load or `generate --messages`
/load FILE     continue a saved conversation
/retry         drop the last reply and answer again
/reset         forget the conversation; system prompt and tools stay
/help          show this
/quit          leave, as Ctrl-D does
A line that ends in \\ goes on in the next. Ctrl-C stops a reply."""


@with_groups
def chat(
    context: typer.Context,
    checkpoint: Checkpoint,
    sampling: ChatSampling,
    model: ModelOptions,
    thinking: Thinking = True,
    preserve_thinking: PreserveThinking = None,
    style: Style = None,
) -> None:
    """Talk to a model in the terminal; /help lists what can be typed besides messages.

    Reasoning is shown dimmed. When the model calls a tool, you type its result. The KV cache is kept between turns:
    only what is new is read, from where the template has changed what was said (as it does with earlier reasoning).
    How tokens are chosen besides stands in the checkpoint's generation_config.json.
    """
    from kimi_k2.api import KimiK2, compute_defaults

    console = new_console()
    options = model.options(context)
    where = model.backend if model.backend != "neuron" else "NxD's CPU mode" if model.on_cpu else model.preset
    computed = compute_defaults(model.backend, model.dtype, model.keep_quantized)[0]
    if model.compiled is not None:
        computed = "as compiled"
    options |= {"sampling": sampling.chosen(), "otherwise": OTHERWISE}
    with KimiK2.open(checkpoint, style=style, keep_cache=True, **options) as session:
        most = session.config.max_position_embeddings
        if session.params.max_new_tokens >= most:
            raise GenerationError(f"max_new_tokens: expected fewer than max_position_embeddings ({most})")
        talk = Chat(session, console, thinking=thinking, preserve_thinking=preserve_thinking)
        tokenizer = session.tokenizer
        console.print(
            f"{checkpoint.name}, {computed} on {where}, chat style {tokenizer.chat_style.value}"
            f" ({tokenizer.style_reason}); /help shows what can be typed",
            style="bold",
        )
        talk.run()


class Chat:
    """The conversation and its commands.

    Attributes:
        system: the system prompt; None for the template's own.
        messages: all others, OpenAI-style.
        tools: definitions that the model is told of.
    """

    def __init__(
        self, session: KimiK2, console: Console, *, thinking: bool = True, preserve_thinking: bool | None = None
    ) -> None:
        self.session, self.console = session, console
        self.thinking = {"thinking": thinking, "preserve_thinking": preserve_thinking}
        self.system: str | None = None
        self.messages: list[Json] = []
        self.tools: list[Json] = []
        self.running = True
        self._images: list[Path] = []
        self._videos: list[Path] = []

    def run(self) -> None:
        """Read lines until the end of the input."""
        with suppress(ImportError):
            import readline  # noqa: F401  (the import turns on history and editing of lines)
        while self.running:
            try:
                line = self._read("you> ").strip()
            except EOFError:
                self.console.print()
                return
            except KeyboardInterrupt:
                self.console.print("\n(Ctrl-D leaves)", style="dim")
                continue
            try:
                self._handle(line)
            except (KeyboardInterrupt, EOFError):
                self._note("\n(stopped; neither message nor reply is kept)")
            except KimiK2Error as error:
                self._complain(str(error))
            except OSError as error:
                self._complain(f"{error.filename}: {error.strerror}")

    def load(self, argument: str) -> None:
        """Continue the conversation of a file."""
        messages, tools = read_messages(Path(argument).expanduser())
        systems = [message.get("content") for message in messages if message.get("role") == "system"]
        self.system = systems[0] if systems and isinstance(systems[0], str) else None
        self.messages = [message for message in messages if message.get("role") != "system"]
        self.tools = tools or self.tools
        self._note(f"{len(self.messages)} messages, {len(self.tools)} tools")

    def offer(self, argument: str) -> None:
        """Offer the tools of a file; none without a file."""
        from kimi_k2.tokenization.tool_declaration import checked_tools

        self.tools = checked_tools(read_tools(Path(argument).expanduser())) if argument else []
        names = ", ".join(tool["function"]["name"] for tool in self.tools if "function" in tool)
        self._note(f"tools: {names or 'none'}")

    def _handle(self, line: str) -> None:
        word, _, argument = line.partition(" ")
        argument = argument.strip()
        match word:
            case "":
                pass
            case "/load" | "/save" | "/image" | "/video" if not argument:
                self._complain(f"{word} needs a file")
            case "/system":
                self.system = argument or self.system
                self._note(f"system: {self.system or 'the template’s own'}")
            case "/tools":
                self.offer(argument)
            case "/image" | "/video":
                self._attach(self._images if word == "/image" else self._videos, argument)
            case "/save":
                self._save(argument)
            case "/load":
                self.load(argument)
            case "/retry":
                self._retry()
            case "/reset":
                self.messages = []
                self._note("a new conversation")
            case "/help":
                self.console.print(HELP)
            case "/quit" | "/exit":
                self.running = False
            case _ if word.startswith("/"):
                self._complain(f"no command {word}; /help lists them")
            case _:
                self._answer(user_message(line, self._images, self._videos))
                self._images.clear()
                self._videos.clear()

    def _answer(self, *messages: Json) -> None:
        """Add messages and the model's replies to them, tool calls included; all or nothing."""
        before = len(self.messages)
        self.messages += messages
        try:
            while calls := self._reply():
                for call in calls:
                    result = self._read(f"result of {call.name}> ")
                    self.messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        except BaseException:
            del self.messages[before:]
            raise

    def _reply(self) -> list[ToolCall]:
        """One reply of the model, shown as it is made; returns its tool calls."""
        from kimi_k2.api import Timing
        from kimi_k2.cli.display import TerminalView

        prompt = self.session.prompt(self._conversation(), tools=self.tools or None, **self.thinking)
        view, timing = TerminalView(self.console), Timing()
        reply = None
        for _, reply in self.session.answer([prompt], view.show, timing):
            view.ended(0, reply)
        assert reply is not None
        message = reply.message
        self.messages.append(message.to_openai())
        ending = " · cut off at --max-new-tokens" if reply.finish_reason == "length" else ""
        drafts = f", {self.session.drafts}" if self.session.drafts is not None else ""
        self._note(f"{len(prompt.ids)} + {reply.tokens} tokens, {timing}{drafts}{ending}")
        return message.tool_calls

    def _conversation(self) -> list[Json]:
        return with_system(self.messages, self.system)

    def _attach(self, attached: list[Path], argument: str) -> None:
        path = Path(argument).expanduser()
        if not path.is_file():
            self._complain(f"no such file: {argument}")
            return
        attached.append(path.resolve())
        self._note(f"with the next message: {', '.join(path.name for path in (*self._images, *self._videos))}")

    def _save(self, argument: str) -> None:
        write_conversation(Path(argument).expanduser(), self._conversation(), self.tools)
        self._note(f"{len(self.messages)} messages in {argument}")

    def _retry(self) -> None:
        users = [number for number, message in enumerate(self.messages) if message["role"] == "user"]
        if not users:
            self._complain("there is no message to answer")
            return
        question = self.messages[users[-1]]
        del self.messages[users[-1] :]
        self._answer(question)

    def _read(self, prompt: str) -> str:
        """A line, with those that it goes on in."""
        lines = [_input(prompt)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(_input("...> "))
        return "\n".join(lines)

    def _note(self, text: str) -> None:
        self.console.print(text, style="dim")

    def _complain(self, text: str) -> None:
        self.console.print(text, style="red")


def _input(prompt: str) -> str:
    """A line of standard input; the prompt is for people only."""
    prompt = printable(prompt)
    if not sys.stdin.isatty():
        return input()
    # readline counts what stands between these marks as no columns.
    return input(f"\001\033[1;32m\002{prompt}\001\033[0m\002")


COMMAND = Command(
    "chat",
    chat,
    "Run a model",
    (
        "kimi-k2 chat /models/Kimi-K2-Instruct-0905",
        "kimi-k2 chat /models/Kimi-K2.5 --backend cuda --no-thinking",
    ),
)
