"""`kimi-k2 generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.options import (
    DEFAULT_CONTEXT,
    DEFAULT_DEPLOYMENT,
    Backend,
    BatchInvariant,
    Checkpoint,
    ChunkSize,
    Compiled,
    ComputeDtype,
    Context,
    Deployed,
    Device,
    Download,
    Images,
    KeepQuantized,
    KvCacheDtype,
    MaxNewTokens,
    OnCpu,
    Ranks,
    Seed,
    Stop,
    Style,
    System,
    Temperature,
    Thinking,
    Tools,
    TopK,
    TopP,
    Videos,
    compute_defaults,
)

if TYPE_CHECKING:
    from kimi_k2.cli.display import View
    from kimi_k2.cli.session import Prompt, Session, Timing
    from kimi_k2.engine.reply import Reply


def generate(
    checkpoint: Checkpoint,
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
    style: Style = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    stop: Stop = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line a reply: message, usage, why.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="With --json: also a line for every delta.")] = False,
    dtype: ComputeDtype = None,
    device: Device = "cpu",
    keep_quantized: KeepQuantized = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    batch_invariant: BatchInvariant = False,
    chunk_size: ChunkSize = None,
    ranks: Ranks = None,
    backend: Backend = "torch",
    preset: Deployed = DEFAULT_DEPLOYMENT,
    compiled: Compiled = None,
    on_cpu: OnCpu = False,
    context: Context = DEFAULT_CONTEXT,
    download: Download = False,
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
    if raw and (messages or system or tools):
        raise typer.BadParameter("--raw goes with --prompt only: --messages, --system and --tools need the template")
    if (images or videos) and (raw or (messages and not prompt)):
        raise typer.BadParameter("--image and --video go with --prompt; a conversation names its own")
    if prompt and messages and len(messages) > 1:
        raise typer.BadParameter("--prompt continues one conversation; give --messages once")
    if backend == "torch" and (compiled is not None or on_cpu):
        raise typer.BadParameter("--compiled and --on-cpu go with --backend neuron")
    if backend == "neuron" and batch_invariant:
        raise typer.BadParameter("--batch-invariant is of the plain model, not of --backend neuron")
    if stream and not as_json:
        raise typer.BadParameter("--stream goes with --json; text appears as it is made in any case")

    import torch

    from kimi_k2.checkpoint.hub import resolve_checkpoint
    from kimi_k2.cli.session import Neuron, Timing, open_session
    from kimi_k2.config import KimiK2Config
    from kimi_k2.engine.sampler import SamplingParams
    from kimi_k2.ops import registry
    from kimi_k2.tokenization.eos import load_eos_token_ids
    from kimi_k2.tokenization.tokenizer import KimiTokenizer

    registry.set_batch_invariant(batch_invariant)
    texts = [] if messages and not prompt else prompt or [sys.stdin.read()]
    conversations = [] if raw else _conversations(texts, messages or [], system, tools, images or [], videos or [])
    directory = resolve_checkpoint(checkpoint, download=download)
    config = KimiK2Config.from_pretrained(directory)
    tokenizer = KimiTokenizer.from_pretrained(directory, style=style)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        eos_token_ids=load_eos_token_ids(directory, config),
    )
    computed, stored = compute_defaults(device, dtype, keep_quantized)
    options: dict[str, Any] = {"keep_quantized": stored, "ranks": ranks, "chunk_size": chunk_size}
    options["kv_cache"] = kv_cache_dtype
    if backend == "neuron":
        options["neuron"] = Neuron(preset, compiled, on_cpu, context, len(conversations) or len(texts))
    compute = getattr(torch, computed)
    with open_session(
        directory, config, tokenizer, params, dtype=compute, device=device, stop=stop or (), **options
    ) as session:
        if raw:
            prompts = [session.bare(text) for text in texts]
        else:
            prompts = [
                session.prompt(conversation, tools=definitions or None, thinking=thinking)
                for conversation, definitions in conversations
            ]
        timing = Timing()
        if session.rank == 0:
            _show(session, prompts, _view(prompts, texts, as_json=as_json, stream=stream), timing)
            typer.echo(timing, err=True)
            if verbose and backend == "torch":
                typer.echo(_computed(session, stored or ranks is not None), err=True)
        else:
            for _ in session.answer(prompts, lambda row, reply, deltas: None, timing):
                pass


def _computed(session: Session, stored: bool) -> str:
    """Dtypes and kernels of what the session ran."""
    from kimi_k2.engine.generator import Generator
    from kimi_k2.ops import registry

    assert isinstance(session.generator, Generator)
    model = session.generator.model
    compute, cache = (str(one).removeprefix("torch.") for one in (model.dtype, model.kv_cache_dtype or model.dtype))
    held = "as stored" if stored else "dequantized"
    where = model.lm_head.weight.device
    return f"{compute} on {where}, weights {held}, KV cache {cache}\n{registry.explain()}"


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

    found = [read_messages(file) for file in files] or [([], [])]
    if texts:
        opening, definitions = found[0]
        found = [([*opening, user_message(text, images, videos)], definitions) for text in texts]
    given = None if tools is None else read_tools(tools)
    return [(with_system(messages, system), definitions if given is None else given) for messages, definitions in found]


def _view(prompts: list[Prompt], texts: list[str], *, as_json: bool, stream: bool) -> View:
    from rich.console import Console

    from kimi_k2.cli.display import JsonView, PanelsView, PlainView, TerminalView

    console = Console()
    if as_json:
        return JsonView(prompts, deltas=stream)
    if not console.is_terminal:
        return PlainView(len(prompts))
    if len(prompts) == 1:
        return TerminalView(console)
    return PanelsView(console, texts or [str(number) for number in range(len(prompts))])


def _show(session: Session, prompts: list[Prompt], view: View, timing: Timing) -> None:
    replies: dict[int, Reply] = {}
    try:
        for row, reply in session.answer(prompts, view.show, timing):
            replies[row] = reply
            view.ended(row, reply)
    finally:
        view.close(replies)


COMMAND = Command("generate", generate, "Run a model")
