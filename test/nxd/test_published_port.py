"""Our difference from the plain model beside the published port's, on the same inputs.

KIMI_K2_PORT=<folder with the port's modeling_kimi_k2.py> pytest -s test/nxd/test_published_port.py
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness import WORKER, expected_logits, launch, neuron_config, plain_model, sequences

from kimi_k2.synthetic import checkpoint
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

PORT = os.environ.get("KIMI_K2_PORT")


@pytest.mark.skipif(not PORT, reason="needs KIMI_K2_PORT, the published port's source folder")
@pytest.mark.parametrize("bias_std", [0.0, 0.1, 0.2])
def test_difference_beside_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bias_std: float) -> None:
    monkeypatch.setattr(checkpoint, "ROUTER_BIAS_STD", bias_std)
    directory = tmp_path / "checkpoint"
    write_synthetic_checkpoint(directory, with_format(tiny_config(), "bf16"), seed=5)
    case = sequences(1, 512)
    job = {"checkpoint": directory, "neuron_config": neuron_config(1, 1, 1), "cases": [case], "port": PORT}
    expected = expected_logits(plain_model(directory), case)
    (ours,) = launch(job, tmp_path / "ours")["logits"]
    (theirs,) = launch(job, tmp_path / "port", worker=WORKER.with_name("port_worker.py"))["logits"]
    difference = {name: float((out - expected).abs().max()) for name, out in (("ours", ours), ("port", theirs))}
    print(
        f"\nbias std {bias_std}: max |logit difference| ours {difference['ours']:.1e}, published port"
        f" {difference['port']:.1e}, logits up to {float(expected.abs().max()):.2f}"
    )
    assert difference["ours"] <= 2e-5
    assert bias_std == 0.0 or difference["port"] > 0.05
