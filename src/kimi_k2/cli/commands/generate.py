"""`kimi-k2 generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.options import (
    Checkpoint,
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
    number,
    refuse,
    with_groups,
)
from kimi_k2.terminal import new_console, say

if TYPE_CHECKING:
    from kimi_k2.api import KimiK2, Prompt, Timing
    from kimi_k2.cli.display import View
    from kimi_k2.engine.reply import Reply

OTHERWISE = {"max_new_tokens": 128}


@with_groups
def generate(
    context: typer.Context,
    checkpoint: Checkpoint,
    sampling: SamplingOptions,
    model: ModelOptions,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="User message; repeat for a batch.")
    ] = None,
    messages: Annotated[
        list[Path] | None,
        typer.Option("--messages", help="Conversation, OpenAI-style JSON, - for standard input; repeat for a batch."),
    ] = None,
    images: Images = None,
    videos: Videos = None,
    system: System = None,
    tools: Tools = None,
    raw: Annotated[bool, typer.Option("--raw", help="Feed the text as it is, without the chat template.")] = False,
    thinking: Thinking = True,
    preserve_thinking: PreserveThinking = None,
    style: Style = None,
    n: Annotated[int, number(1, "Replies to each prompt; above 1 with a temperature.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(min=0, max=20, help="With --json: log-probabilities, of so many likeliest tokens too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line a reply: message, usage, why.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="With --json: also a line for every delta.")] = False,
    ranks: Ranks = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Say in which dtypes and by which kernels it was computed.")
    ] = False,
) -> None:
    """Generate text from a checkpoint.

    On a terminal replies appear as they are made, with reasoning and tool calls set apart. In a pipe one reply is
    written as the model makes it, markup included, and several at the end; --json parses them. --prompt beside one
    --messages continues that conversation. Without either, the prompt is read from standard input.

    With --ranks CHECKPOINT gives the configuration and the tokenizer only, and rank 0 prints.
    """
    if ranks is not None and not prompt and not messages:
        raise typer.BadParameter("--ranks needs --prompt or --messages, as input reaches one process only")
    if raw:
        template = ("messages", "system", "tools", "style", "thinking", "preserve_thinking")
        refuse(context, "needs the chat template, which --raw leaves out", *template)
    if (images or videos) and (raw or (messages and not prompt)):
        raise typer.BadParameter("--image and --video go with --prompt; a conversation names its own")
    if prompt and messages and len(messages) > 1:
        raise typer.BadParameter("--prompt continues one conversation; give --messages once")
    if (stream or logprobs is not None) and not as_json:
        raise typer.BadParameter("--stream and --logprobs go with --json; text appears as it is made in any case")
    from kimi_k2.api import KimiK2, Timing

    texts = [] if messages and not prompt else prompt or [sys.stdin.read()]
    conversations = [] if raw else _conversations(texts, messages or [], system, tools, images or [], videos or [])
    options = model.options(context, batch_size=n * (len(conversations) or len(texts)))
    options |= {"sampling": sampling.chosen(logprobs=logprobs), "otherwise": OTHERWISE, "stop": sampling.stop or ()}
    with KimiK2.open(checkpoint, ranks=ranks, style=style, **options) as session:
        if n > 1 and session.params.temperature == 0:
            raise typer.BadParameter(
                "greedy replies to one prompt are the same: give a --temperature", param_hint="--n"
            )
        if raw:
            prompts = [session.bare(text) for text in texts]
        else:
            prompts = [
                session.prompt(
                    conversation,
                    tools=definitions or None,
                    thinking=thinking,
                    preserve_thinking=preserve_thinking,
                )
                for conversation, definitions in conversations
            ]
        prompts, texts = ([one for one in inputs for _ in range(n)] for inputs in (prompts, texts))  # type: ignore[assignment]
        timing = Timing()
        if session.rank == 0:
            _show(session, prompts, _view(session, prompts, texts, as_json=as_json, stream=stream), timing)
            say(timing, err=True)
            if model.draft is not None:
                say(f"drafts: {session.drafts}", err=True)
            if verbose and model.backend != "neuron":
                say(_computed(session, model, ranks is not None), err=True)
        else:
            for _ in session.answer(prompts, timing=timing):
                pass


def _computed(session: KimiK2, options: ModelOptions, ranks: bool) -> str:
    """Dtypes and kernels of what the session ran."""
    from kimi_k2.api import compute_defaults
    from kimi_k2.engine.generate import Generator
    from kimi_k2.ops import registry

    assert isinstance(session.generator, Generator)
    model = session.generator.model
    compute, cache = (str(one).removeprefix("torch.") for one in (model.dtype, model.kv_cache_dtype or model.dtype))
    stored = ranks or compute_defaults(options.backend, options.dtype, options.keep_quantized)[1]
    weights = "as stored" if stored else "dequantized"
    where = model.lm_head.weight.device
    return f"{compute} on {where}, weights {weights}, KV cache {cache}\n{registry.explain(model.batch_invariant)}"


def _conversations(
    texts: list[str],
    files: list[Path],
    system: str | None,
    tools: Path | None,
    images: list[Path],
    videos: list[Path],
) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Messages and tools of each sequence."""
    from kimi_k2.cli.conversation import read_messages, read_tools, user_message, with_system

    chats = [read_messages(file) for file in files] or [([], [])]
    if texts:
        opening, definitions = chats[0]
        chats = [([*opening, user_message(text, images, videos)], definitions) for text in texts]
    specs = None if tools is None else read_tools(tools)
    return [(with_system(messages, system), definitions if specs is None else specs) for messages, definitions in chats]


def _view(session: KimiK2, prompts: list[Prompt], texts: list[str], *, as_json: bool, stream: bool) -> View:
    from kimi_k2.cli.display import JsonView, PanelsView, PlainView, TerminalView

    console = new_console()
    if as_json:
        return JsonView(prompts, session.tokenizer, deltas=stream)
    if not console.is_terminal:
        return PlainView(len(prompts))
    if len(prompts) == 1:
        return TerminalView(console)
    return PanelsView(console, texts or [str(number) for number in range(len(prompts))])


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
