"""`kimi-k2 generate`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k2.cli.options import ChatStyleOption, Checkpoint, Dtype, KeepQuantized, Ranks, Seed

if TYPE_CHECKING:
    from kimi_k2.engine.generate import Step
    from kimi_k2.engine.sampler import SamplingParams
    from kimi_k2.tokenization.tokenizer import KimiTokenizer


def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="User message; repeat for a batch.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Feed the text as it is, without the chat template.")] = False,
    chat_style: ChatStyleOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus size in (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Tokens to choose from; 0 for all.")] = 0,
    seed: Seed = 0,
    dtype: Annotated[Dtype, typer.Option(help="Compute dtype.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    keep_quantized: KeepQuantized = False,
    chunk_size: Annotated[int | None, typer.Option(min=1, help="Prefill this many tokens at a time.")] = None,
    ranks: Ranks = None,
) -> None:
    """Generate text from a checkpoint; tokens appear as they are made (one prompt) or at the end (several).

    With --ranks CHECKPOINT gives the configuration and the tokenizer only, and rank 0 prints.
    """
    if ranks is not None and not prompt:
        raise typer.BadParameter("--ranks needs --prompt, as input reaches one process only")

    import torch

    from kimi_k2.bench.backend import check_device
    from kimi_k2.cli.loading import load_model
    from kimi_k2.config import KimiK2Config
    from kimi_k2.engine.generator import Generator
    from kimi_k2.engine.sampler import SamplingParams
    from kimi_k2.parallel.ranks import load_ranks
    from kimi_k2.tokenization.eos import load_eos_token_ids
    from kimi_k2.tokenization.tokenizer import KimiTokenizer

    prompts = prompt or [sys.stdin.read()]
    config = KimiK2Config.from_pretrained(checkpoint)
    tokenizer = KimiTokenizer.from_pretrained(checkpoint, style=chat_style)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        eos_token_ids=load_eos_token_ids(checkpoint, config),
    )
    encoded = [
        tokenizer.encode(text) if raw else tokenizer.encode_chat([{"role": "user", "content": text}])
        for text in prompts
    ]
    compute = getattr(torch, dtype)
    if ranks is None:
        check_device(device)
        generator = Generator(load_model(checkpoint, dtype=compute, device=device, keep_quantized=keep_quantized))
        _print_steps(generator.stream(encoded, params, chunk_size=chunk_size), tokenizer, params, len(prompts))
        return
    with load_ranks(ranks, config, compute, device) as part:
        steps = part.generator.stream(encoded, params, chunk_size=chunk_size)
        if part.number == 0:
            _print_steps(steps, tokenizer, params, len(prompts))
        else:
            for _ in steps:
                pass


def _print_steps(steps: Iterable[Step], tokenizer: KimiTokenizer, params: SamplingParams, sequences: int) -> None:
    """Text as it is made, or of several sequences at the end; then TTFT and TPOT on standard error."""
    decoders = [tokenizer.incremental_decoder() for _ in range(sequences)]
    texts = ["" for _ in range(sequences)]
    seconds = []
    for step in steps:
        seconds.append(step.seconds)
        for row, token in enumerate(step.tokens):
            if token is not None and token not in params.eos_token_ids:
                piece = decoders[row].feed(token)
                texts[row] += piece
                if sequences == 1:
                    typer.echo(piece, nl=False)
    for row, decoder in enumerate(decoders):
        rest = decoder.flush()
        if sequences == 1:
            typer.echo(rest)
        else:
            typer.echo(f"--- {row}\n{texts[row]}{rest}")
    tpot = sum(seconds[1:]) / max(len(seconds) - 1, 1)
    typer.echo(f"TTFT {seconds[0]:.3f} s, TPOT {tpot:.4f} s, {len(seconds)} steps", err=True)
