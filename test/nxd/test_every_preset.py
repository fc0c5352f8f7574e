"""Every Trainium preset for every member: graphs at real widths cost what is planned, and tiny models run right.

The presets and members that run without KIMI_K2_SLOW are one of each form of decode. Graphs with images:
test_compile_images.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness import SLOW, launch
from test_lowering import DECODE, PREFILL, collectives_of, lowered, same_weights

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.deployment import Deployment, preset_names
from kimi_k2.sharding.plan import make_plan

WORKER = Path(__file__).with_name("every_preset_worker.py")
TOLERANCE = 2e-5
STORED = {  # members by what they store: FP8 blocks, and INT4
    "kimi-k2-instruct-0905": ("kimi-k2-instruct", "kimi-k2-instruct-0905"),
    "kimi-k2-thinking": ("kimi-k2-thinking", "kimi-k2.5", "kimi-k2.6", "kimi-k2.7-code"),
}
PRESETS = [
    name for name in preset_names() if name.startswith("trn2") and Deployment.load(name).torch_native is None
]  # fmt: skip
QUICK = {
    ("trn2-tp32-ep2-nki-layers", "kimi-k2-thinking"), ("trn2-tp64-ep1-b32-4k", "kimi-k2-thinking"),
    ("trn2-tp32-ep2-1k", "kimi-k2-thinking"),
}  # fmt: skip


def cases(*more: str) -> list[Any]:
    """Presets with members of each stored form; all but QUICK are slow, and so are graphs of batches."""
    made = []
    for name in PRESETS:
        batched = Deployment.load(name).neuron_config.ctx_batch_size is not None
        for stored in STORED:
            quick = (name, stored) in QUICK and not (more and batched)
            made.append(pytest.param(name, stored, *more, marks=[] if quick else SLOW))
    return made


def test_members_of_a_stored_form_have_one_plan() -> None:
    """So that graphs of one member of each say what those of all cost."""
    layout = Deployment.load("trn2-tp32-ep2-nki-layers")
    for stored, members in STORED.items():
        plans = [make_plan(config, layout.layout(config)).tensors for config in map(KimiK2Config.from_preset, members)]
        assert all(one == plans[0] for one in plans), stored


@pytest.mark.parametrize(("preset", "stored", "stage"), [*cases(DECODE), *cases(PREFILL)])
def test_graphs_cost_what_is_planned(preset: str, stored: str, stage: str) -> None:
    if "images" in preset:
        pytest.skip("test_compile_images.py")
    decode = Deployment.load(preset).neuron_config.decode
    layers = "3" if decode == "layers" else "2"
    counts = lowered(preset, layers, stage, stored)
    planned = same_weights(counts)
    assert counts["bytes_moved"] == pytest.approx(planned["bytes_moved"], rel=0.01, abs=1e7)
    assert counts["live"] <= counts["planned_live"]
    assert collectives_of(counts) == collectives_of(planned)
    if stage == DECODE:
        assert bool(counts["kernels"]) == (decode != "xla")


@pytest.mark.parametrize(("preset", "stored"), cases())
def test_tiny_models_run_right(tmp_path: Path, preset: str, stored: str) -> None:
    """Two ranks: expert parallelism, shared experts and caches as the preset has them."""
    members = STORED[stored]
    job = {"checkpoint": "", "preset": preset, "members": members, "neuron_config": {"tp_degree": 2}}
    found = launch(job, tmp_path, WORKER, timeout=200 * len(members))
    deployment = Deployment.load(preset)
    for member in members:
        one = found[member]
        print(f"\n{preset} {member}: {one}")
        assert one["decode"] == deployment.neuron_config.decode
        assert bool(one["kernels"]) == (one["decode"] != "xla")
        assert one["far"] <= TOLERANCE
        assert one["same"]
