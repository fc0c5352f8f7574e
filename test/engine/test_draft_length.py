"""How many tokens to draft, from what was accepted and what a step of so many rows costs."""

from __future__ import annotations

import math

import pytest

from kimi_k2.checkpoint.names import expected_tensors
from kimi_k2.engine.draft_length import OPERATIONS, DraftLength, step_cost
from kimi_k2.model.decoder import KimiK2ForCausalLM


def test_lengths_follow_acceptance_and_the_batch() -> None:
    """All of them while they are accepted, none once they are not, and fewer where more rows cost more."""
    length = DraftLength(3, lambda rows: 1 + 0.3 * rows, 0.02)
    for _ in range(100):
        length.observe(3, 3)
    assert length.choose(1) == 3
    for _ in range(300):
        length.observe(3, 0)
    tries = [step for step in range(1000) if length.choose(1)]  # one is tried again, less and less often
    assert tries == [31, 95, 223, 479, 735, 991]
    length.observe(1, 0)
    assert sum(length.choose(1) for _ in range(256)) == 1
    for _ in range(100):
        length.observe(3, 3)
    assert length.choose(1) == 3
    for _ in range(300):
        length.observe(3, 0)
    assert sum(length.choose(1) for _ in range(32)) == 1
    steep = DraftLength(3, lambda rows: 1.0 if rows <= 4 else rows)
    assert (steep.choose(1), steep.choose(4)) == (3, 0)


def test_a_step_of_more_rows_reads_more_experts(model: KimiK2ForCausalLM) -> None:
    """Weights of a checkpoint: with one row the chosen experts' share, with very many all; and operations a row."""
    cost, config = step_cost(model.config), model.config
    specs = {spec.name: spec.nbytes for spec in expected_tensors(config)}
    every = sum(specs.values()) - specs["model.embed_tokens.weight"] - specs["model.norm.weight"]
    row = (cost(2 * 10**6) - cost(10**6)) / 10**6
    assert cost(10**6) - 10**6 * row == pytest.approx(every)
    expert = sum(size for name, size in specs.items() if ".experts.0." in name)  # in all layers
    reads = cost(10**6) - cost(1) - (10**6 - 1) * row
    assert reads == pytest.approx(expert * (config.n_routed_experts - config.num_experts_per_tok), rel=1e-4)
    routed = expert * config.num_experts_per_tok  # of one byte each; their scales are few
    others = [spec for spec in expected_tensors(config) if ".experts." not in spec.name]
    active = routed + sum(math.prod(spec.shape) for spec in others if "embed" not in spec.name)
    assert row == pytest.approx(2 * active / OPERATIONS, rel=0.01)
