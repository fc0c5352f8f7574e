"""Every Trainium preset for every member, brought down to two ranks and tiny models; real widths: test_lowering.py.

The presets and members that run without KIMI_K2_SLOW are one of each form of decode.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import schedule
import torch
from applications import answers
from cases import WHOLE, Stored, compare, rounded_to
from harness import SLOW, launch
from reference import reference
from test_lowering import PRESETS, STORED

from kimi_k2.config import KimiK2Config
from kimi_k2.neuron.application import cpu_deployment
from kimi_k2.plan.deployment import Deployment

QUICK = {
    ("trn2-tp32-ep2-nki-layers", "kimi-k2-thinking"), ("trn2-tp64-ep1-b32-4k", "kimi-k2-thinking"),
    ("trn2-tp32-ep2-1k", "kimi-k2-thinking"),
}  # fmt: skip


@pytest.mark.parametrize(("preset", "form"), [
    pytest.param(*case, marks=() if case in QUICK else SLOW) for case in itertools.product(PRESETS, STORED)
])  # fmt: skip
def test_tiny_models_run_right(monkeypatch: pytest.MonkeyPatch, stored: Stored, preset: str, form: str) -> None:
    """Two ranks: expert parallelism, shared experts and caches as the preset has them."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    deployment = Deployment.load(preset)
    batch = deployment.batch_size
    tiny = cpu_deployment(deployment, length=64, batch_size=batch)
    heads = 2 if tiny.cache_ranks > 1 else 4
    sizes: dict[str, Any] = {
        **WHOLE, "hidden_size": 256, "n_routed_experts": 384 if batch > 8 else 128, "num_attention_heads": heads,
        "num_key_value_heads": heads, "vision": None, "form": "",
    }  # fmt: skip
    script = schedule.sequences(batch, 2, lengths=[5 + line % 7 for line in range(batch)])
    sources = {member: stored(member=member, **sizes) for member in STORED[form]}
    jobs = {name: {"checkpoint": path, "preset": preset, "scripts": [script]} for name, path in sources.items()}
    found = launch(answers, jobs, ranks=2, timeout=200 * len(jobs))
    for member, path in sources.items():
        config = KimiK2Config.from_pretrained(path)
        layout = replace(tiny.layout(config), dtype=torch.float32)
        held = layout.expert_format(config)
        compare(f"{preset} {member}", found[member], script, reference(path, *rounded_to(held, config)))
        assert found[member]["decode"] == deployment.neuron_config.decode
        assert bool(found[member]["kernels"]) == (found[member]["decode"] != "xla")
