"""The parity tool from the plain model to the NxDI class in CPU mode, by NxDI's tensor capture, in deployed formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Stored
from harness import bf16_preset, launch
from rewritten import rewritten

from kimi_k2.config import KimiK2Config
from kimi_k2.parity.compare import compare
from kimi_k2.parity.logits import random_tokens
from kimi_k2.parity.trace import Inputs
from kimi_k2.plan.deployment import Deployment


def verdict(source: Path, served: Path, dtype: str, preset: str | None, mode: str) -> Any:
    """A job: whether the comparison passed, its first fault, or beside the plain model's error the worst ratio."""
    from kimi_k2.neuron import cpu
    from kimi_k2.parity.run import run

    cpu.prepare()
    inputs, config = Inputs(random_tokens(512, 24, 0), random_tokens(512, 4, 1)), KimiK2Config.from_pretrained(source)
    golden = run("cpu", source, inputs, "float32")
    deployed = run("neuron", served, inputs, dtype, preset=Deployment.load(preset) if preset else None)
    result = compare(deployed, golden, config, dtype)
    if mode == "beside":
        plain = compare(run("cpu", source, inputs, dtype), golden, config, dtype)
        errors = {(point.phase, point.point): point.relative_l2 for point in plain.points}
        ratios = [point.relative_l2 / errors[point.phase, point.point] for point in result.points]
        return max(ratios), len(ratios)
    return result.passed, result.first and (result.first.phase, result.first.layer, result.first.module)


def with_fault(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """In the attention of layer 2."""
    tensors["model.layers.2.self_attn.o_proj.weight_scale_inv"] *= 1.01
    return tensors


@pytest.mark.parametrize(("mode", "dtype", "preset", "ranks"), [
    ("clean", "float32", None, 1), ("fault", "float32", None, 1), ("beside", "bfloat16", "trn2-tp32-ep2", 1),
    ("clean", "float32", "trn2-tp32-ep2", 2), ("clean", "float32", "trn2-tp64-ep1-128k", 2),
])  # fmt: skip
def test_verdict(stored: Stored, tmp_path: Path, mode: str, dtype: str, preset: str | None, ranks: int) -> None:
    """What a graph returns of rank 0 is the whole of each point, with experts and cache on two ranks too.

    `beside`: in the deployed dtype and experts' format no point is farther from float32 than the plain model in BF16.
    """
    split = preset == "trn2-tp64-ep1-128k"  # whose scales a channel the plain model does not have
    source = stored(form="bf16" if split else "fp8", num_hidden_layers=2 if mode == "beside" else 3)
    preset = bf16_preset(preset, tmp_path) if preset and split else preset
    served = rewritten(source, tmp_path / "faulty", with_fault) if mode == "fault" else source
    found = launch(verdict, source, served, dtype, preset, mode, ranks=ranks)
    if mode == "beside":
        worst, points = found
        print(f"\nworst of {points} points: {worst:.2f} times the plain model's error in BF16")
        assert points == 2 * (2 * 8 + 1)  # two phases; two layers, eight points each, and the logits
        assert worst <= 1.25
        return
    passed, first = found
    assert passed == (mode == "clean")
    assert first is None if passed else (*first[:2], first[2].partition(".")[0]) == ("prefill", 2, "self_attn")
