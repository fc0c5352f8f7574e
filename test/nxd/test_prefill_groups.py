"""Prefill whose experts' blocks are taken in several groups: each token sums over all; float32, the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import execute, expected_logits, launch, neuron_config, plain_model, sequences

TOLERANCE = 2e-5
ROWS = 64  # four blocks of 16 tokens; the prompts fill many


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (1, 2)])
@pytest.mark.parametrize("way", ["CPU mode", "executed"])
def test_groups(checkpoints: dict[str, Path], tmp_path: Path, way: str, tp: int, ep: int) -> None:
    case = sequences(4, 512, steps=1)
    options = neuron_config(tp, ep, 4, torch_dtype="float32")
    options["blockwise_matmul_config"]["parallelize_token_to_block_mapping"] = True
    options["prefill_rows_at_once"] = ROWS
    made: dict[str, Any] = {"checkpoint": checkpoints["bf16"], "neuron_config": options, "cases": [case]}
    (logits,) = launch(made, tmp_path) if way == "CPU mode" else execute(made, tmp_path)["logits"]
    plain = expected_logits(plain_model(checkpoints["bf16"]), case)
    print(f"\n{way}, TP{tp} x EP{ep}: max |difference| to the plain model {float((logits - plain).abs().max()):.1e}")
    torch.testing.assert_close(logits, plain, rtol=0, atol=TOLERANCE)
