"""NeuronKimiK2ForCausalLM on real NxD source, real gloo ranks, against transformers and the plain model; float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import expected_logits, launch, neuron_config, plain_model, sequences

from kimi_k2.parity.reference import MissingLibraryError, load_transformers_model

TOLERANCE = 2e-5
LAYOUTS = {"TP1": (1, 1), "TP2": (2, 1), "TP4": (4, 1), "EP2": (1, 2), "TP2xEP2": (2, 2)}


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_and_16_decode_steps(checkpoints: dict[str, Path], tmp_path: Path, layout: str, batch: int) -> None:
    tp, ep = LAYOUTS[layout]
    directory = checkpoints["bf16"]
    case = sequences(batch, 512)
    job = {"checkpoint": directory, "neuron_config": neuron_config(tp, ep, batch), "cases": [case]}
    (logits,) = launch(job, tmp_path)
    try:
        reference = expected_logits(load_transformers_model(directory), case)
    except MissingLibraryError as error:
        pytest.skip(str(error))
    plain = expected_logits(plain_model(directory), case)
    worst = float((logits - reference).abs().max())
    print(
        f"\n{layout} batch {batch}: max |difference| to transformers {worst:.1e},"
        f" to the plain model {float((logits - plain).abs().max()):.1e}, logits up to {float(plain.abs().max()):.2f}"
    )
    torch.testing.assert_close(logits, reference, rtol=0, atol=TOLERANCE)
    torch.testing.assert_close(logits, plain, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["thinking", "k2.5"])
def test_int4_checkpoints(checkpoints: dict[str, Path], tmp_path: Path, name: str) -> None:
    """K2-Thinking's and K2.5's formats (INT4 groups, `language_model.` names, their YaRN settings and epsilon)."""
    case = sequences(4, 512)
    job = {"checkpoint": checkpoints[name], "neuron_config": neuron_config(1, 2, 4), "cases": [case]}
    (logits,) = launch(job, tmp_path)
    plain = expected_logits(plain_model(checkpoints[name]), case)
    print(f"\n{name} EP2 batch 4: max |difference| to the plain model {float((logits - plain).abs().max()):.1e}")
    torch.testing.assert_close(logits, plain, rtol=0, atol=TOLERANCE)


def test_bias_before_the_sigmoid_is_far_off(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The published port's arrangement, behind a switch: shows that parity above is not blind to the bias."""
    case = sequences(4, 512)
    options = neuron_config(1, 1, 4, router_bias_before_sigmoid=True)
    job = {"checkpoint": checkpoints["bf16"], "neuron_config": options, "cases": [case]}
    (logits,) = launch(job, tmp_path)
    difference = float((logits - expected_logits(plain_model(checkpoints["bf16"]), case)).abs().max())
    print(f"\nbias before the sigmoid: max |difference| {difference:.2f}")
    assert difference > 1000 * TOLERANCE


@pytest.mark.parametrize("layout", ["TP1", "EP2"])
def test_continuous_batching_with_sequences_in_any_order(
    checkpoints: dict[str, Path], tmp_path: Path, layout: str
) -> None:
    tp, ep = LAYOUTS[layout]
    directory = checkpoints["bf16"]
    case = sequences(4, 512)
    options = neuron_config(
        tp, ep, 4, is_continuous_batching=True, ctx_batch_size=1, tkg_batch_size=4, max_batch_size=4
    )
    job = {"checkpoint": directory, "neuron_config": options, "cases": [{**case, "arrival": [2, 0, 3, 1]}]}
    (logits,) = launch(job, tmp_path)
    expected = expected_logits(plain_model(directory), case)
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE)
