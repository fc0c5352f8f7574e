"""An independent watch around the same decode loop, to check what the sweep calls TPOT."""

from __future__ import annotations

import statistics
import time

import torch

from kimi_k2.bench.backend import Prompts, TorchBackend
from kimi_k2.bench.results import tpot
from kimi_k2.bench.sweep import time_run
from kimi_k2.generate import decode_step, prefill


def stopwatch_tpot(backend: TorchBackend, prompts: Prompts, new_tokens: int) -> float:
    """Seconds a token after the first: one watch started behind the first token and stopped behind the last."""
    model, length = backend.model, len(prompts[0])
    cache = model.new_cache(len(prompts), length + new_tokens - 1)
    tokens = prefill(model, prompts, cache).argmax(-1)
    tokens.tolist()
    start = time.perf_counter()
    for step in range(new_tokens - 1):
        positions = torch.full((len(prompts),), length + step, device=tokens.device)
        tokens = decode_step(model, tokens, positions, cache).argmax(-1)
        tokens.tolist()
    return (time.perf_counter() - start) / (new_tokens - 1)


def check_tpot(backend: TorchBackend, prompts: Prompts, new_tokens: int, rounds: int = 15) -> tuple[float, float]:
    """Median TPOT of the sweep's timing and of the stopwatch, in turns so that both see the same machine."""
    swept, watched = [], []
    for number in range(rounds + 1):
        pair = [
            lambda: swept.append(tpot(time_run(backend, prompts, new_tokens))),
            lambda: watched.append(stopwatch_tpot(backend, prompts, new_tokens)),
        ]
        for one in pair[:: 1 if number % 2 else -1]:
            one()
    return statistics.median(swept[1:]), statistics.median(watched[1:])  # the first round warms up
