"""`kimi-k2 generate`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.conversation import read_messages, read_tools, user_message, with_system
from kimi_k2.cli.options import (
    Checkpoint,
    Count,
    Images,
    ModelOptions,
    PreserveThinking,
    Ranks,
    SamplingOptions,
    Style,
    System,
    Thinking,
    Tools,
    Videos,
    refuse,
    with_groups,
)
from kimi_k2.files import Json
from kimi_k2.terminal import new_console, say

if TYPE_CHECKING:
    from kimi_k2.api import KimiK2, Prompt, Timing
    from kimi_k2.cli.display import View
    from kimi_k2.engine.reply import Reply

OTHERWISE = {"max_new_tokens": 128}


@dataclass(frozen=True)
class Asked:
    """What the replies answer.

    Attributes:
        messages: Conversation, OpenAI-style JSON, - for standard input; repeat for a batch.
        raw: Feed the text as it is, without the chat template.
        n: Replies to each prompt; above 1 with a temperature.
    """

    prompt: Annotated[list[str] | None, typer.Option("--prompt", "-p", help="User message; repeat for a batch.")] = None
    messages: list[Path] | None = None
    images: Images = None
    videos: Videos = None
    system: System = None
    tools: Tools = None
    raw: bool = False
    thinking: Thinking = True
    preserve_thinking: PreserveThinking = None
    n: Count = 1

    def texts(self) -> list[str]:
        """Of users, by sequence; without any, `chats` has what --messages names."""
        return [] if self.messages and not self.prompt else self.prompt or [sys.stdin.read()]

    def chats(self, texts: list[str]) -> list[tuple[list[Json], list[Json]]]:
        """Messages and tools of each sequence."""
        chats = [read_messages(file) for file in self.messages or []] or [([], [])]
        if texts:
            opening, definitions = chats[0]
            users = (user_message(text, self.images or [], self.videos or []) for text in texts)
            chats = [([*opening, user], definitions) for user in users]
        specs = None if self.tools is None else read_tools(self.tools)
        return [
            (with_system(messages, self.system), definitions if specs is None else specs)
            for messages, definitions in chats
        ]


@dataclass(frozen=True)
class Shown:
    """How replies are shown.

    Attributes:
        verbose: Say in which dtypes and by which kernels it was computed.
        as_json: Print a JSON line a reply: message, usage, why.
    """

    logprobs: Annotated[
        int | None, typer.Option(min=0, max=20, help="With --json: log-probabilities, of so many likeliest tokens too.")
    ] = None
    as_json: bool = False
    verbose: bool = False

    def view(self, session: KimiK2, prompts: list[Prompt], texts: list[str]) -> View:
        """As JSON, or as text: on a terminal as it is generated, or in a panel each; in a pipe plain."""
        from kimi_k2.cli.display import JsonView, PanelsView, PlainView, TerminalView

        console = new_console()
        if self.as_json:
            return JsonView(prompts, session.tokenizer)
        if not console.is_terminal:
            return PlainView(len(prompts))
        if len(prompts) == 1:
            return TerminalView(console)
        return PanelsView(console, texts or [str(number) for number in range(len(prompts))])


@with_groups
def generate(
    context: typer.Context,
    checkpoint: Checkpoint,
    asked: Asked,
    sampling: SamplingOptions,
    model: ModelOptions,
    shown: Shown,
    style: Style = None,
    ranks: Ranks = None,
) -> None:
    """Generate text from a checkpoint.

    On a terminal replies appear as they are generated, with reasoning and tool calls set apart. In a pipe one reply is
    written as the model writes it, markup included, and several at the end; --json parses them. --prompt beside one
    --messages continues that conversation. Without either, the prompt is read from standard input.

    With --ranks CHECKPOINT gives the configuration and the tokenizer only, and rank 0 prints.
    """
    if ranks is not None and not asked.prompt and not asked.messages:
        raise typer.BadParameter("--ranks needs --prompt or --messages, as input reaches one process only")
    if asked.raw:
        template = ("messages", "system", "tools", "style", "thinking", "preserve_thinking")
        refuse(context, "needs the chat template, which --raw leaves out", *template)
    if (asked.images or asked.videos) and (asked.raw or (asked.messages and not asked.prompt)):
        raise typer.BadParameter("--image and --video go with --prompt; a conversation names its own")
    if asked.prompt and asked.messages and len(asked.messages) > 1:
        raise typer.BadParameter("--prompt continues one conversation; give --messages once")
    if shown.logprobs is not None and not shown.as_json:
        raise typer.BadParameter("goes with --json", param_hint="--logprobs")
    from kimi_k2.api import KimiK2, Timing

    texts = asked.texts()
    chats = [] if asked.raw else asked.chats(texts)
    options = model.options(context, batch_size=asked.n * (len(chats) or len(texts)))
    options |= {"sampling": sampling.chosen(logprobs=shown.logprobs), "otherwise": OTHERWISE}
    with KimiK2.open(checkpoint, ranks=ranks, style=style, stop=sampling.stop or (), **options) as session:
        if asked.n > 1 and session.params.temperature == 0:
            raise typer.BadParameter(
                "greedy replies to one prompt are the same: give a --temperature", param_hint="--n"
            )
        turns = {"thinking": asked.thinking, "preserve_thinking": asked.preserve_thinking}
        prompts = [session.prompt(messages, tools=tools or None, **turns) for messages, tools in chats]
        prompts = [prompt for prompt in prompts or map(session.bare, texts) for _ in range(asked.n)]
        timing = Timing()
        if session.rank > 0:
            for _ in session.answer(prompts, timing=timing):
                pass
            return
        titles = [text for text in texts for _ in range(asked.n)]
        _show(session, prompts, shown.view(session, prompts, titles), timing)
        say(timing, err=True)
        if model.draft is not None:
            say(f"drafts: {session.drafts}", err=True)
        if shown.verbose and model.backend != "neuron":
            say(_computed(session, model, ranks is not None), err=True)


def _computed(session: KimiK2, options: ModelOptions, ranks: bool) -> str:
    """Dtypes and kernels of what the session ran."""
    from kimi_k2.api import compute_defaults
    from kimi_k2.engine.generate import Generator
    from kimi_k2.ops import registry

    assert isinstance(session.generator, Generator)
    model = session.generator.model
    compute, cache = (str(dtype).removeprefix("torch.") for dtype in (model.dtype, model.kv_cache_dtype or model.dtype))
    stored = ranks or compute_defaults(options.backend, options.dtype, options.keep_quantized)[1]
    weights = "as stored" if stored else "dequantized"
    where = model.lm_head.weight.device
    return f"{compute} on {where}, weights {weights}, KV cache {cache}\n{registry.explain(model.batch_invariant)}"


def _show(session: KimiK2, prompts: list[Prompt], view: View, timing: Timing) -> None:
    replies: dict[int, Reply] = {}
    try:
        for row, reply in session.answer(prompts, view.show, timing):
            replies[row] = reply
            view.ended(row, reply)
    finally:
        view.close(replies)


COMMAND = Command(
    "generate",
    generate,
    "Run a model",
    (
        'kimi-k2 generate /models/Kimi-K2-Thinking -p "What is MLA?" --temperature 0.6 --max-new-tokens 256',
        "kimi-k2 generate /models/Kimi-K2-Thinking --messages chat.json --tools tools.json --json",
        "torchrun --nproc-per-node 8 --no-python kimi-k2 generate /models/Kimi-K2 --ranks /ranks --backend cuda -p Hi",
    ),
)
