"""The parity tool from the plain model to the NxDI class in CPU mode, by NxDI's tensor capture, in deployed formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cases import Stored
from harness import bf16_preset, launch

from kimi_k2.config import KimiK2Config
from kimi_k2.neuron import contrib
from kimi_k2.parity.compare import compare
from kimi_k2.parity.logits import random_tokens
from kimi_k2.parity.trace import Inputs
from kimi_k2.plan.deployment import Deployment


def verdict(source: Path, dtype: str, preset: str | None, mode: str) -> Any:
    """A job: whether the comparison passed, its first fault, or beside the plain model's error the worst ratio."""
    from kimi_k2.neuron import cpu
    from kimi_k2.parity.run import run

    cpu.prepare()
    inputs, config = Inputs(random_tokens(512, 24, 0), random_tokens(512, 4, 1)), KimiK2Config.from_pretrained(source)
    golden = run("cpu", source, inputs, "float32")
    if mode == "fault":
        attention, made = contrib.load("attention").KimiK2Attention, list[Any]()
        forward, build = attention.forward, attention.__init__

        def wrong(self: Any, hidden_states: torch.Tensor, *rest: Any, **more: Any) -> Any:
            return forward(self, hidden_states * (1.01 if self is made[2] else 1), *rest, **more)

        def counted(self: Any, *rest: Any, **more: Any) -> None:
            build(self, *rest, **more)
            made.append(self)

        attention.__init__, attention.forward = counted, wrong
    deployed = run("neuron", source, inputs, dtype, preset=Deployment.load(preset) if preset else None)
    result = compare(deployed, golden, config, dtype)
    if mode == "beside":
        plain = compare(run("cpu", source, inputs, dtype), golden, config, dtype)
        errors = {(point.phase, point.point): point.relative_l2 for point in plain.points}
        ratios = [point.relative_l2 / errors[point.phase, point.point] for point in result.points]
        return max(ratios), len(ratios)
    return result.passed, result.first and (result.first.phase, result.first.layer, result.first.module)


def outcome(
    source: Path, mode: str = "clean", dtype: str = "float32", preset: str | None = None, ranks: int = 1
) -> Any:
    """Of processes of their own: it takes the process group of its ranks."""
    return launch(verdict, source, dtype, preset, mode, ranks=ranks)


def test_a_clean_pair_passes(checkpoints: dict[str, Path]) -> None:
    assert outcome(checkpoints["fp8"]) == (True, None)


def test_a_fault_in_the_attention_of_layer_2_is_named(checkpoints: dict[str, Path]) -> None:
    passed, (phase, layer, module) = outcome(checkpoints["fp8"], "fault")
    assert (passed, phase, layer, module.partition(".")[0]) == (False, "prefill", 2, "self_attn")


def test_bf16_with_fp8_blocks(stored: Stored) -> None:
    """The deployed dtype and experts' format: at no point farther from float32 than the plain model in BF16."""
    source = stored(form="fp8", num_hidden_layers=2, seed=1)
    worst, points = outcome(source, "beside", "bfloat16", "trn2-tp32-ep2")
    print(f"\nworst of {points} points: {worst:.2f} times the plain model's error in BF16")
    assert points == 2 * (2 * 8 + 1)  # two phases; two layers, eight points each, and the logits
    assert worst <= 1.25


def test_two_ranks_with_fp8_blocks_and_expert_parallelism(checkpoints: dict[str, Path]) -> None:
    """The deployed layout: what a graph returns of rank 0 is the whole of each point."""
    assert outcome(checkpoints["fp8"], preset="trn2-tp32-ep2", ranks=2) == (True, None)


def test_flash_decoding(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    preset = bf16_preset("trn2-tp64-ep1-128k", tmp_path)
    assert outcome(checkpoints["bf16"], preset=preset, ranks=2) == (True, None)
