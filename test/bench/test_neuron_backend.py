"""The neuron backend's loop on real NxD and NxDI, in CPU mode, against the plain model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.neuron import contrib

NXD_TESTS = Path(__file__).parents[1] / "nxd"


@pytest.mark.nxd
@pytest.mark.skipif(bool(contrib.missing()), reason=f"needs NxD and NxDI: {', '.join(contrib.missing())}")
def test_neuron_steps_choose_the_plain_models_tokens(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    sys.path.insert(0, str(NXD_TESTS))
    import harness

    prompts, new_tokens = [[5, 17, 300, 41, 8, 99]], 20
    job = {
        "checkpoint": checkpoints["bf16"],
        "neuron_config": harness.neuron_config(1, 1, 1),
        "prompts": prompts,
        "new_tokens": new_tokens,
    }
    worker = Path(__file__).with_name("neuron_worker.py")
    (tokens,) = harness.launch(job, tmp_path, worker=worker)
    model = harness.plain_model(checkpoints["bf16"])
    expected = generate(model, prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)).token_ids
    assert tokens.tolist() == expected
