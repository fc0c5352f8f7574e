"""Prefill in padded sizes; replayed from graphs, on a GPU. `test_decode_step.py` holds it against the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kimi_k2.bench.kernels.model import decide_routes, synthetic_rank
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.prompt_step import MAX_GRAPHS, PromptStep, padded_width
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops import registry
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.config import tiny_config

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    relative: float = ((a.double() - b.double()).norm() / b.double().norm()).item()
    return relative


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


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("preset", ["kimi-k2-instruct-0905", "kimi-k2-thinking"])
@torch.inference_mode()
def test_replays(preset: str) -> None:
    """Prompts of many lengths, each twice and more: the bits of the launches, and near to the plain model."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 256, "intermediate_size": 512, "num_hidden_layers": 3}
    config = tiny_config(preset, **sizes)
    model = decide_routes(synthetic_rank(config, Layout(1, target="cuda", experts="stored"), 0, communicate=False))
    step = PromptStep(DecodeStep(model, new_cache(model, 2, 600), graph=True))
    caches, fresh = (
        [new_cache(model, 2, 600) for _ in range(2)],
        PromptStep(DecodeStep(model, new_cache(model, 2, 600))),
    )
    generator, pad = torch.Generator().manual_seed(1), torch.nn.functional.pad
    errors: list[tuple[float, float]] = []
    for length in (5, 16, 5, 14, 300, 290, 5, 300, 257, 3, 280):
        ids = torch.randint(0, config.vocab_size, (2, length), generator=generator)
        positions = torch.arange(length).expand(2, -1).clone()
        positions[1, length // 2 + 1 :] = -1
        last = torch.tensor([length - 1, length // 2])
        found = step(ids, positions, last).clone()
        extra, wide = (0, padded_width(length) - length), padded_width(length)
        launched = fresh.run(pad(ids, extra).cuda(), pad(positions, extra, value=-1).cuda(), last.cuda(), wide)
        assert torch.equal(found, launched), length
        given = ids.cuda(), positions.cuda()
        by_modules = model(*given, caches[0], logits_at=last.cuda())
        registry.pin("plain")
        plain = model(*given, caches[1], logits_at=last.cuda())
        registry.pin("")
        errors.append((distance(found, plain), distance(by_modules, plain)))
    ours, modules = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    print(f"\n{preset}: distance to plain bfloat16 {ours:.2e}, of the modules with kernels {modules:.2e}")
    assert ours < 1.15 * modules + 1e-3
    assert 0 < len(step._captured) <= MAX_GRAPHS
    step.close()
    assert not step._captured
