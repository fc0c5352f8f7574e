"""Steps of several tokens, for verifying drafts: CPU mode and executed graphs, float32, the plain model.

Every position has its own routing: with drafts among the tokens, and cache lines that earlier drafts have written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from harness import execute, expected_logits, launch, neuron_config, plain_model, sequences

from kimi_k2.errors import ConfigError

TOLERANCE = 2e-5
WIDTH = 3
ACCEPTED = [3, 1, 2, 3, 2, 1]  # of WIDTH tokens in each step
LAYOUTS = {"TP1": (1, 1), "TP2": (2, 1), "TP2xEP2": (2, 2)}


def job(directory: Path, layout: str, batch: int, **options: Any) -> tuple[dict[str, Any], torch.Tensor]:
    """A job of one case, and the plain model's logits for it."""
    tp, ep = LAYOUTS[layout]
    case: dict[str, Any] = sequences(batch, 512, steps=sum(ACCEPTED) + WIDTH)
    neuron = neuron_config(tp, ep, batch, speculation_length=WIDTH, torch_dtype="float32", **options)
    made = {"checkpoint": directory, "neuron_config": neuron, "cases": [{**case, "accepted": ACCEPTED}]}
    kept = {**case, "forced": [row[: sum(ACCEPTED)] for row in case["forced"]]}
    return made, expected_logits(plain_model(directory), kept)


@pytest.mark.parametrize(("layout", "batch"), [("TP1", 4), ("TP2", 1), ("TP2xEP2", 4)])
def test_cpu_mode(checkpoints: dict[str, Path], tmp_path: Path, layout: str, batch: int) -> None:
    """With one sequence the chosen experts are loaded, with four all of them are."""
    made, plain = job(checkpoints["bf16"], layout, batch)
    (logits,) = launch(made, tmp_path)
    print(f"\n{layout} batch {batch}: max |difference| to the plain model {float((logits - plain).abs().max()):.1e}")
    torch.testing.assert_close(logits, plain, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", ["TP1", "TP2xEP2"])
def test_executed(checkpoints: dict[str, Path], tmp_path: Path, layout: str) -> None:
    made, plain = job(checkpoints["bf16"], layout, 1)
    made["neuron_config"]["blockwise_matmul_config"]["parallelize_token_to_block_mapping"] = True
    done = execute(made, tmp_path)
    assert {stage for stage, _ in done["calls"]} == {"context_encoding_model", "speculation_model"}
    (logits,) = done["logits"]
    print(f"\n{layout}, executed: max |difference| to the plain model {float((logits - plain).abs().max()):.1e}")
    torch.testing.assert_close(logits, plain, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("given", [
    {"speculation_length": 1},
    {"speculation_length": 16, "context_encoding_buckets": [16, 48], "enable_bucketing": True},
])  # fmt: skip
def test_a_prompt_must_not_look_like_drafts(given: dict[str, Any]) -> None:
    """NxDI tells the stages apart by the number of tokens alone."""
    with pytest.raises(ConfigError, match="speculation_length"):
        environment.contrib("config").KimiK2NeuronConfig(seq_len=48, max_context_length=48, **given)
