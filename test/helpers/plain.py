"""The plain model by steps, as what faster steps are held to."""

from __future__ import annotations

from torch import Tensor

from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM


def decode_step(model: KimiK2ForCausalLM, tokens: Tensor, positions: Tensor, cache: LatentCache) -> Tensor:
    """One token a sequence, each at its own position: int64 [B], int64 [B] to logits [B, vocab_size]."""
    logits: Tensor = model(tokens[:, None], positions[:, None], cache)
    return logits[:, 0]
