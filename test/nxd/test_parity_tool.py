"""The parity tool from the plain model to the NxDI class in CPU mode, by NxDI's tensor capture, in deployed formats."""

from __future__ import annotations

import subprocess
from pathlib import Path

from harness import bf16_preset, torchrun

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config

WORKER = """
import os
import sys
sys.path.insert(0, sys.argv[1])
from kimi_k2.config import KimiK2Config
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parity.compare import compare
from kimi_k2.parity.logits import random_tokens
from kimi_k2.parity.run import run
from kimi_k2.parity.trace import Inputs
from kimi_k2.plan.deployment import Deployment
source = sys.argv[2]
inputs = Inputs(random_tokens(512, 24, 0), random_tokens(512, 4, 1))
config = KimiK2Config.from_pretrained(source)
golden = run("cpu", source, inputs, "float32")
if sys.argv[3] == "fault":
    from kimi_k2.neuron import contrib
    from kimi_k2.neuron import cpu
    cpu.prepare()
    attention = contrib.load("attention").KimiK2Attention
    forward = attention.forward
    def wrong(self, hidden_states, *rest, **more):
        return forward(self, hidden_states * (1.01 if self is wrong.third else 1), *rest, **more)
    build = attention.__init__
    made = []
    def counted(self, *rest, **more):
        build(self, *rest, **more)
        made.append(self)
        wrong.third = made[2] if len(made) > 2 else None
    attention.__init__, attention.forward = counted, wrong
preset = None if len(sys.argv) < 5 else Deployment.load(sys.argv[5])
dtype = "float32" if len(sys.argv) < 5 else sys.argv[4]
result = compare(run("nxdi", source, inputs, dtype, preset=preset), golden, config, dtype)
if sys.argv[3] == "beside":
    plain = compare(run("cpu", source, inputs, dtype), golden, config, dtype)
    errors = {(point.phase, point.point): point.relative_l2 for point in plain.points}
    ratios = [point.relative_l2 / errors[point.phase, point.point] for point in result.points]
    print("RESULT", max(ratios), len(ratios))
    sys.exit()
first = result.first
if os.environ.get("RANK", "0") == "0":  # lines of several ranks would run into one another
    print("RESULT", result.passed, first and (first.phase, first.layer, first.module), len(result.points))
"""


def outcome(directory: Path, mode: str, *deployed: str, ranks: int = 1) -> str:
    """The worker's verdict, from processes of its own: it takes the process group of its ranks."""
    command = [*torchrun(ranks), "-c", WORKER, str(Path(__file__).parent), str(directory), mode, *deployed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))


def test_a_clean_pair_passes(checkpoints: dict[str, Path]) -> None:
    assert outcome(checkpoints["fp8"], "clean").startswith("RESULT True None")


def test_a_fault_in_the_attention_of_layer_2_is_named(checkpoints: dict[str, Path]) -> None:
    assert "RESULT False ('prefill', 2, 'self_attn." in outcome(checkpoints["fp8"], "fault")


def test_bf16_with_fp8_blocks(tmp_path: Path) -> None:
    """The deployed dtype and experts' format: at no point farther from float32 than the plain model in BF16."""
    write_synthetic_checkpoint(tmp_path, tiny_config("kimi-k2-instruct-0905", num_hidden_layers=2), seed=1)
    _, worst, points = outcome(tmp_path, "beside", "bfloat16", "trn2-tp32-ep2").split()
    print(f"\nworst of {points} points: {float(worst):.2f} times the plain model's error in BF16")
    assert int(points) == 2 * (2 * 8 + 1)  # two phases; two layers, eight points each, and the logits
    assert float(worst) <= 1.25


def test_two_ranks_with_fp8_blocks_and_expert_parallelism(checkpoints: dict[str, Path]) -> None:
    """The deployed layout: what a graph returns of rank 0 is the whole of each point."""
    verdict = outcome(checkpoints["fp8"], "clean", "float32", "trn2-tp32-ep2", ranks=2)
    assert verdict.startswith("RESULT True None")


def test_flash_decoding(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    preset = bf16_preset("trn2-tp64-ep1-128k", tmp_path)
    assert outcome(checkpoints["bf16"], "clean", "float32", preset, ranks=2).startswith("RESULT True None")
