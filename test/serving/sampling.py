"""Sampling parameters for requests of a test, in turn."""

from __future__ import annotations

from typing import Any

# What vLLM's sampler must know of tokens made before, of its own random numbers, of the batch.
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 5, "logprobs": 4},
    {"temperature": 0, "repetition_penalty": 1.4, "min_tokens": 20, "stop_token_ids": list(range(200))},
    {"temperature": 0.6, "min_p": 0.05, "seed": 8, "logit_bias": {7: 4.0, 11: -100.0}},
    {"temperature": 0, "allowed_token_ids": list(range(30, 90))},
]
PROCESSORS = ["forced:Forced"]  # `logits_processors` of an engine whose process finds forced.py
FORCED = "forced"


def forced(tokens: list[int]) -> dict[str, Any]:
    """A request that answers with these tokens; their log-probabilities are those before any processor."""
    return {"extra_args": {FORCED: tokens}}
