"""Drawn combinations of member, layout, decode form, batch, prefix cache, tokens a step and cache split.

KIMI_K2_DRAWS is how many; a fifth of them on TP2, a fifth on EP2.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from drawn_kernels_worker import drawn, refused
from harness import LAYOUTS, launch

WORKER = Path(__file__).with_name("drawn_kernels_worker.py")
TOLERANCE = 2e-5
COUNT = int(os.environ.get("KIMI_K2_DRAWS", "5"))
SHARES = {"TP1": COUNT - 2 * (COUNT // 5), "TP2": COUNT // 5, "EP2": COUNT // 5}


def calls(one: dict[str, Any]) -> dict[str, int]:
    """How often the kernel runs: MoE layers are all but the first."""
    steps, moe = one["steps"], one["layers"] - 1
    each = one["layers_per_kernel"] or moe
    return {} if one["decode"] == "xla" else {"decode_layers": steps * -(-moe // each)}


@pytest.mark.parametrize("layout", [layout for layout, share in SHARES.items() if share])
def test_drawn(tmp_path: Path, layout: str) -> None:
    seeds = list(range(SHARES[layout]))
    job = {"checkpoint": "", "layout": layout, "seeds": seeds}
    ranks = LAYOUTS[layout][0] * LAYOUTS[layout][1]
    found = launch({**job, "neuron_config": {"tp_degree": ranks}}, tmp_path, WORKER, timeout=60 + 60 * len(seeds))
    assert [one["seed"] for one in found] == seeds
    for one in found:
        print(f"\n{layout} {one}")
        assert {name: one[name] for name in drawn(one["seed"], layout)} == drawn(one["seed"], layout)
        assert one["refused"] == refused(one), one
        if one["refused"] is not None:
            assert "NxDI" in one["message"]
            continue
        assert one["far"] <= TOLERANCE, one
        assert one["same"], one
        assert one["kernels"] == calls(one), one
