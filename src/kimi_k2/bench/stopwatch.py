"""Independent watches around the same decode, to check what the sweep calls TPOT."""

from __future__ import annotations

import statistics
import time

import torch

from kimi_k2.bench.backend import Prompts, TorchBackend
from kimi_k2.bench.results import tpot
from kimi_k2.bench.sweep import time_run
from kimi_k2.engine.generate import prefill


def whole_call(backend: TorchBackend, prompts: Prompts, new_tokens: int) -> float:
    """Seconds of one generation, by a watch that knows nothing of steps."""
    start = time.perf_counter()
    list(backend.generate(prompts, new_tokens))
    return time.perf_counter() - start


def bare_loop(backend: TorchBackend, prompts: Prompts, new_tokens: int) -> float:
    """Seconds a token after the first of nothing but decode steps and argmax: what `stream` adds is the rest."""
    model, length = backend.model, len(prompts[0])
    cache, decode = backend.generator.prepare(len(prompts), length + new_tokens - 1)
    tokens = prefill(model, prompts, cache, read=backend.generator.prompt).argmax(-1)
    tokens.tolist()
    start = time.perf_counter()
    for step in range(new_tokens - 1):
        positions = torch.full((len(prompts),), length + step, device=tokens.device)
        tokens = decode(tokens, positions).argmax(-1)
        tokens.tolist()
    return (time.perf_counter() - start) / (new_tokens - 1)


def check_tpot(backend: TorchBackend, prompts: Prompts, new_tokens: int, rounds: int = 15) -> dict[str, float]:
    """Median seconds a token after the first, three ways, in turns so that all see the same machine.

    Returns:
        `sweep`: as the sweep takes it; `stopwatch`: a call for all tokens less a call for one, over the tokens after
        the first; `bare`: see `bare_loop`.
    """
    taken: dict[str, list[float]] = {"sweep": [], "stopwatch": [], "bare": []}
    for _ in range(rounds + 1):
        taken["sweep"].append(tpot(time_run(backend, prompts, new_tokens)))
        longer, shorter = whole_call(backend, prompts, new_tokens), whole_call(backend, prompts, 1)
        taken["stopwatch"].append((longer - shorter) / (new_tokens - 1))
        taken["bare"].append(bare_loop(backend, prompts, new_tokens))
    return {name: statistics.median(values[1:]) for name, values in taken.items()}  # the first round warms up
