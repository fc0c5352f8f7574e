"""Ways of serving, through NxDI's own host code over executed graphs: see modes_worker.py for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from harness import TOLERANCE, run_executed

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format


@pytest.fixture(scope="module")
def modes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every mode's result, from one process."""
    directory = tmp_path_factory.mktemp("modes")
    write_synthetic_checkpoint(directory / "source", with_format(tiny_config(num_hidden_layers=2), "bf16"), seed=4)
    worker, output = Path(__file__).with_name("modes_worker.py"), directory / "output.pt"
    run_executed([str(worker), str(directory / "source"), str(output)], ranks=2)
    result: dict[str, Any] = torch.load(output)
    return result


def test_on_device_sampling(modes: dict[str, Any]) -> None:
    found, expected, worst = modes["sampled_on_device"]
    assert found == expected
    assert len(set(found)) > 4
    assert worst <= TOLERANCE


@pytest.mark.parametrize("name", ["generated", "generated_asynchronously"])
def test_generation(modes: dict[str, Any], name: str) -> None:
    if not environment.adapter_runs():
        pytest.skip("HuggingFaceGenerationAdapter of NxDI 0.8 reads a name that it never sets")
    found, expected = modes[name]
    assert found == expected
