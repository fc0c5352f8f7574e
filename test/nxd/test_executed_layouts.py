"""One lowered graph for all ranks, executed with its collectives on as many CPU devices; float32, the plain model.

CPU mode runs each rank's own Python. It cannot show what a single traced graph gets wrong for ranks other than 0, nor
what torch_xla makes of an operation.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import execute, expected_logits, neuron_config, plain_model, sequences

TOLERANCE = 2e-5
LAYOUTS = {"TP4": (4, 1), "EP2": (1, 2), "TP2xEP2": (2, 2)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_and_decode(checkpoints: dict[str, Path], tmp_path: Path, layout: str) -> None:
    """Ranks share the work of assigning tokens to blocks, as in the presets."""
    tp, ep = LAYOUTS[layout]
    case = sequences(4, 512)
    options = neuron_config(tp, ep, 4, torch_dtype="float32")
    options["blockwise_matmul_config"]["parallelize_token_to_block_mapping"] = True
    done = execute({"checkpoint": checkpoints["bf16"], "neuron_config": options, "cases": [case]}, tmp_path)
    plain = expected_logits(plain_model(checkpoints["bf16"]), case)
    (logits,) = done["logits"]
    print(f"\n{layout}: max |difference| to the plain model {float((logits - plain).abs().max()):.1e}")
    torch.testing.assert_close(logits, plain, rtol=0, atol=TOLERANCE)
