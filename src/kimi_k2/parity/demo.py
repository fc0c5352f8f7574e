"""The main job on an embedded default: checkpoint, prefill, decode, comparison with transformers, a short report."""

from __future__ import annotations

import resource
import tempfile
import time
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import Generator, prefill
from kimi_k2.errors import ConfigError, GenerationError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parity.reference import load_transformers_model, needs_transformers
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config
from kimi_k2.terminal import new_console
from kimi_k2.tokenization.tokenizer import KimiTokenizer

TOLERANCE = 1e-5
PROMPT = "Which experts would you like to talk to today?"


def run_demo(out: Path | None, preset: str, new_tokens: int, seed: int) -> int:
    """Run the demo and print its report.

    Args:
        out: directory to keep the checkpoint in; None for a temporary one.
        preset: published configuration to shrink.
        new_tokens: tokens to decode.
        seed: of the synthetic weights.

    Returns:
        0, or 1 if a logit differs from transformers' by more than 1e-5 or a token differs.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="kimi-k2-demo-") as directory:
            return run_demo(Path(directory) / "checkpoint", preset, new_tokens, seed)
    console = new_console()
    config = tiny_config(preset)
    needs_transformers()
    if not (out / "model.safetensors.index.json").exists():
        size = write_synthetic_checkpoint(out, config, seed=seed)
        console.print(f"wrote a synthetic {preset} checkpoint: {size / 1e6:.1f} MB of tensors")
    elif KimiK2Config.from_pretrained(out) != config:
        raise ConfigError(f"expected the small {preset}, here is another model; give another --out", file=out)
    console.print(
        f"loading it, decoding {new_tokens} tokens, then the same with transformers: some seconds", style="dim"
    )
    start = time.perf_counter()
    model = KimiK2ForCausalLM.from_pretrained(out)
    load_seconds = time.perf_counter() - start
    prompt = KimiTokenizer.from_pretrained(out).encode_chat([{"role": "user", "content": PROMPT}])

    if len(prompt) + new_tokens > config.max_position_embeddings:
        raise GenerationError(
            f"new_tokens: expected at most {config.max_position_embeddings - len(prompt)} after the prompt"
            f" (max_position_embeddings is {config.max_position_embeddings}), got {new_tokens}"
        )

    # The first pass through any torch operator pays for its set-up; that is no part of TTFT.
    model(torch.tensor([[0]]))
    tokens, logits, seconds = _decode(model, prompt, new_tokens)
    difference, same_tokens = _compare(out, prompt, tokens, logits)

    report = Table("figure", "value", title="Kimi-K2 demo (synthetic weights, CPU, float32)", show_header=False)
    for name, value in (
        ("prompt tokens / new tokens", f"{len(prompt)} / {len(tokens)}"),
        ("load", f"{load_seconds:.2f} s"),
        ("TTFT", f"{seconds[0] * 1e3:.1f} ms"),
        ("TPOT", f"{sum(seconds[1:]) / (len(seconds) - 1) * 1e3:.2f} ms"),
        ("max |logit - transformers|", f"{difference:.2e} (largest logit {logits.abs().max():.2f})"),
        ("same greedy tokens as transformers", "yes" if same_tokens else "NO"),
        ("KV cache", f"{config.cache_dim} values a token a layer, held once"),
        ("peak memory (transformers included)", f"{_peak_rss() / 2**20:.0f} MiB"),
    ):
        report.add_row(name, value)
    console.print(report)
    passed = difference <= TOLERANCE and same_tokens
    console.print("PASS" if passed else f"FAIL: expected at most {TOLERANCE} and the same tokens")
    return 0 if passed else 1


def _decode(model: KimiK2ForCausalLM, prompt: list[int], new_tokens: int) -> tuple[list[int], Tensor, list[float]]:
    """Greedy tokens, the logits each was chosen from [new_tokens, vocab_size], and the seconds of each step."""
    generator = Generator(model)
    cache, decode = generator.prepare(1, len(prompt) + new_tokens)
    tokens: list[int] = []
    logits: list[Tensor] = []
    seconds: list[float] = []
    for step in range(new_tokens):
        start = time.perf_counter()
        if step == 0:
            row = prefill(model, [prompt], cache, read=generator.prompt)
        else:
            row = decode(torch.tensor(tokens[-1:]), torch.tensor([len(prompt) + step - 1]))
        tokens.append(int(row.argmax()))
        seconds.append(time.perf_counter() - start)
        logits.append(row[0])
    return tokens, torch.stack(logits), seconds


@torch.inference_mode()
def _compare(directory: Path, prompt: list[int], tokens: list[int], logits: Tensor) -> tuple[float, bool]:
    """Largest logit difference from one transformers pass over prompt and tokens, and whether its choices agree."""
    reference = load_transformers_model(directory)
    full = reference(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    return float((full - logits).abs().max()), full.argmax(dim=-1).tolist() == tokens


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
