"""A cache of e4m3 values: the model with entries rounded by PyTorch, and half of bfloat16's bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM


class RoundedCache(LatentCache):
    """Float32 slots with what e4m3 would keep."""

    def update(self, layer: int, entries: Tensor, positions: Tensor, length: int) -> Tensor:
        return super().update(layer, entries.to(torch.float8_e4m3fn).to(entries.dtype), positions, length)


@torch.inference_mode()
def test_the_model_sees_rounded_entries(fp8: Path) -> None:
    model = KimiK2ForCausalLM.from_pretrained(fp8)
    ids = torch.randint(0, model.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(5))
    ours = new_cache(model, 2, 12, dtype=torch.float8_e4m3fn)
    rounded, exact = RoundedCache(model.config, 2, 12), new_cache(model, 2, 12)
    slots = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7], [-1, -1, 0, 1, 2, 3, 4, 5]])
    logits = [model(ids[:, :8], slots, cache) for cache in (ours, rounded, exact)]
    assert torch.equal(ours.data.float(), rounded.data)
    assert (logits[0] - logits[1]).norm() / logits[1].norm() < 1e-6
    assert (logits[0] - logits[2]).norm() / logits[2].norm() > 1e-4  # the rounding is there
    step, positions = DecodeStep(model, ours), torch.tensor([8, 6])
    for _ in range(3):
        tokens = ids[torch.arange(2), positions]
        found, wanted = step(tokens, positions), model(tokens[:, None], positions[:, None], rounded)[:, 0]
        assert (found - wanted).norm() / wanted.norm() < 1e-5
        positions = positions + 1
    assert torch.equal(ours.data.float(), rounded.data)
    assert ours.data.nbytes * 2 == new_cache(model, 2, 12, dtype=torch.bfloat16).data.nbytes


def test_values_beyond_the_format_are_saturated() -> None:
    from kimi_k2.synthetic.config import tiny_config

    cache = LatentCache(tiny_config(), 1, 4, dtype=torch.float8_e4m3fn)
    entries = torch.full((1, 1, cache.data.shape[-1]), 1e4)
    assert bool((cache.update(0, entries, torch.tensor([[2]]), 3)[0, 2].float() == 448).all())
