"""The folder's graphs at Kimi-K2's widths on torch_xla: what is in them for a rank of 64."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).with_name("folder_lowering_worker.py")


@pytest.mark.parametrize(("tp", "ep", "experts"), [(32, 2, "fp8"), (64, 1, "bf16")], ids=["TP32xEP2", "TP64"])
def test_graphs(tp: int, ep: int, experts: str) -> None:
    command = [sys.executable, str(WORKER), str(tp), str(ep), experts, "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    found: list[dict[str, Any]] = [json.loads(line) for line in re.findall(r"(?m)^COUNTS (.*)$", done.stdout)]
    print(f"\n{found}")
    local = 384 // ep
    for graph in found:
        # Of each layer two sums, behind attention and feed-forward, and its down projections; embedding and logits.
        assert graph["collectives"] == {"all-reduce": 4, "all-gather": 4}
        assert graph["f64"] == 0
        # Trained values are parameters; none was folded, none but the router's bias and FP8's scales is float32.
        assert graph["constants"] == {}
        scales = {"layers.1.mlp.experts.gate_up_proj.scale", "layers.1.mlp.experts.down_proj.scale"}
        bias = "layers.1.mlp.router.e_score_correction_bias"
        assert set(graph["float32"]) == ({bias, *scales} if experts == "fp8" else {bias})
        weight = "f8e4m3fn" if experts == "fp8" else "bf16"
        assert graph["experts"] == [weight, [local, 7168, 2 * 2048 // tp]]
    prefill, decode = found
    assert decode["selected"] == [8, 7168, 2 * 2048 // tp]  # experts that a step of one token loads
    assert prefill["bytes"] < 500_000
