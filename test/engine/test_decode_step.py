"""The arrangement for CUDA graphs against the plain model, on a CPU: same tokens, same cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.generate import prefill
from kimi_k2.model.decoder import KimiK2ForCausalLM


@pytest.mark.parametrize("source", ["wide", "thinking", "bf16"])
@pytest.mark.parametrize("keep_quantized", [True, False])
@torch.inference_mode()
def test_steps_agree_with_the_plain_model(
    checkpoints: dict[str, Path], wide: Path, source: str, keep_quantized: bool
) -> None:
    directory = wide if source == "wide" else checkpoints[source]
    model = KimiK2ForCausalLM.from_pretrained(directory, keep_quantized=keep_quantized)
    torch.manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (2, 9))
    wanted = model(ids)
    cache = model.new_cache(2, 9)
    prefill(model, [ids[0, :4].tolist(), ids[1, :6].tolist()], cache)
    step, positions = DecodeStep(model, cache), torch.tensor([4, 6])
    for _ in range(3):
        logits = step(ids[torch.arange(2), positions], positions)
        plain = wanted[torch.arange(2), positions]
        assert (logits - plain).norm() / plain.norm() < 2e-5
        positions = positions + 1
