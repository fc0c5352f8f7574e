"""The plain model by steps, as what faster steps are held to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kimi_k2.engine.generate import prefill
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM


def decode_step(model: KimiK2ForCausalLM, tokens: Tensor, positions: Tensor, cache: LatentCache) -> Tensor:
    """One token a sequence, each at its own position: int64 [B], int64 [B] to logits [B, vocab_size]."""
    logits: Tensor = model(tokens[:, None], positions[:, None], cache)
    return logits[:, 0]


def along(
    model: KimiK2ForCausalLM, prompts: Sequence[Sequence[int]], replies: Sequence[Sequence[int]], **options: Any
) -> Iterator[Tensor]:
    """Logits [B, vocab_size] behind prompts, and then behind each token of replies of one length but the last."""
    lengths, count = torch.tensor([len(prompt) for prompt in prompts]), len(replies[0])
    cache = model.new_cache(len(prompts), int(lengths.max()) + count)
    yield prefill(model, prompts, cache, **options)
    for step in range(count - 1):
        yield decode_step(model, torch.tensor([reply[step] for reply in replies]), lengths + step, cache)
