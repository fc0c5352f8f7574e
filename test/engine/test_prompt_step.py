"""Prefill in padded sizes, as graphs have them; `test_decode_step.py` holds it against the plain model."""

from __future__ import annotations

from pathlib import Path

import torch

from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.prompt_step import PromptStep, padded_width
from kimi_k2.model.decoder import KimiK2ForCausalLM


@torch.inference_mode()
def test_padding_changes_nothing(wide: Path) -> None:
    """Columns without a token and slots that lie ahead, as a captured size has them."""
    model = KimiK2ForCausalLM.from_pretrained(wide, keep_quantized=True)
    steps = [PromptStep(DecodeStep(model, new_cache(model, 1, 40))) for _ in range(2)]
    ids, positions, last = (torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 2]]), torch.tensor([2]))
    wanted = steps[0].run(ids, positions, last, 3)
    wide_ids, wide_positions = (torch.zeros(1, 16, dtype=torch.int64), torch.full((1, 16), -1))
    wide_ids[:, :3], wide_positions[:, :3] = ids, positions
    found = steps[1].run(wide_ids, wide_positions, last, 32)
    assert (found - wanted).norm() / wanted.norm() < 2e-5
    assert torch.equal(steps[1].cache.data[:, :, 3:], torch.zeros_like(steps[1].cache.data[:, :, 3:]))


def test_widths() -> None:
    """Never less than asked for, at most a quarter more from 64 on, and few of them."""
    widths = [padded_width(tokens) for tokens in range(1, 4097)]
    assert all(width >= tokens for tokens, width in enumerate(widths, 1))
    assert all(width <= 1.25 * tokens for tokens, width in enumerate(widths, 1) if tokens >= 64)
    assert len(set(widths)) < 40
    assert [padded_width(n) for n in (1, 64, 1000, 1024, 1025)] == [16, 64, 1024, 1024, 1280]
