"""Decode with NKI kernels in NxD's CPU mode, on the emulator: the same logits as the plain model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import expected_logits, launch, neuron_config, plain_model, sequences

TOLERANCE = 2e-5
LAYOUTS = {"TP1": (1, 1), "TP2": (2, 1), "EP2": (1, 2)}


@pytest.mark.parametrize(("layout", "cores"), [("TP1", 1), ("TP1", 2), ("TP2", 2), ("EP2", 2)])
def test_prefill_and_16_steps_with_the_router_kernel(
    checkpoints: dict[str, Path], tmp_path: Path, layout: str, cores: int
) -> None:
    tp, ep = LAYOUTS[layout]
    case = sequences(4, 512)
    options = neuron_config(tp, ep, 4, nki_kernels=["router"], logical_nc_config=cores)
    (logits,) = launch({"checkpoint": checkpoints["bf16"], "neuron_config": options, "cases": [case]}, tmp_path)
    plain = expected_logits(plain_model(checkpoints["bf16"]), case)
    print(f"\n{layout}, {cores} cores: max |difference| to the plain model {float((logits - plain).abs().max()):.1e}")
    torch.testing.assert_close(logits, plain, rtol=0, atol=TOLERANCE)
    assert torch.equal(logits.argmax(-1), plain.argmax(-1))
