"""The parity tool from the plain model to the NxDI class in CPU mode: a clean pair, and a fault named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
from kimi_k2.config import KimiK2Config
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parity.compare import compare
from kimi_k2.parity.logits import random_tokens
from kimi_k2.parity.run import run
from kimi_k2.parity.trace import Inputs
source = sys.argv[2]
inputs = Inputs(random_tokens(512, 24, 0), random_tokens(512, 4, 1))
config = KimiK2Config.from_pretrained(source)
golden = run("cpu", source, inputs, "float32")
if sys.argv[3] == "fault":
    from kimi_k2.neuron import contrib
    from kimi_k2.parity import nxdi
    nxdi._prepare()
    norm = contrib.load("norm")
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
result = compare(run("nxdi", source, inputs, "float32"), golden, config)
first = result.first
print("RESULT", result.passed, first and (first.phase, first.layer, first.module), len(result.points))
"""


def outcome(directory: Path, mode: str) -> str:
    """The worker's verdict, from a process of its own: it takes the process group of one rank."""
    command = [sys.executable, "-c", WORKER, str(Path(__file__).parent), str(directory), mode]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))


def test_a_clean_pair_passes(checkpoints: dict[str, Path]) -> None:
    assert outcome(checkpoints["fp8"], "clean").startswith("RESULT True None")


def test_a_fault_in_the_attention_of_layer_2_is_named(checkpoints: dict[str, Path]) -> None:
    assert "RESULT False ('prefill', 2, 'self_attn." in outcome(checkpoints["fp8"], "fault")
