"""NeuronKimiK2ForCausalLM on real NxD source, real gloo ranks, against transformers and the plain model; float32."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import LAYOUTS, check, expected_logits, launch, neuron_config, plain_model, sequences

from kimi_k2.parity.reference import MissingLibraryError, load_transformers_model


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_and_16_decode_steps(checkpoints: dict[str, Path], tmp_path: Path, layout: str, batch: int) -> None:
    tp, ep = LAYOUTS[layout]
    directory = checkpoints["bf16"]
    case = sequences(batch, 512)
    job = {"checkpoint": directory, "neuron_config": neuron_config(tp, ep, batch), "cases": [case]}
    (logits,) = launch(job, tmp_path)["logits"]
    try:
        reference = expected_logits(load_transformers_model(directory), case)
    except MissingLibraryError as error:
        pytest.skip(str(error))
    plain = expected_logits(plain_model(directory), case)
    check(f"{layout} batch {batch}, to transformers", logits, reference)
    check(f"{layout} batch {batch}, to the plain model", logits, plain)


@pytest.mark.parametrize("name", ["thinking", "k2.5"])
def test_int4_checkpoints(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    """K2-Thinking's and K2.5's formats (INT4 groups, `language_model.` names, their YaRN settings and epsilon)."""
    case = sequences(4, 512)
    job = {"checkpoint": checkpoints[name], "neuron_config": neuron_config(1, 2, 4), "cases": [case]}
    (logits,) = launch(job, tmp_path)["logits"]
    check(f"{name} EP2 batch 4", logits, expected_logits(plain_model(checkpoints[name]), case))
