"""Every fault of the tables is seen by the job that it is listed with, and the class as it is passes all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_decode_layers
import test_lora
import torch
from cases import job
from faults import FAULTS, patch
from harness import SLOW, WAYS, expected_logits, plain_model, sequences

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

WORKER = Path(__file__).with_name("cases_worker.py")
# The model of jobs that are executed.
SIZES: dict[str, dict[str, Any]] = {
    "class": {"num_hidden_layers": 1, "first_k_dense_replace": 0}, "modes": {"num_hidden_layers": 2},
}  # fmt: skip


def test_each_fault_still_applies() -> None:
    """A fault replaces a piece of the source, which must be there."""
    for rows in FAULTS.values():
        for faults in rows.values():
            for _, *replaced in faults:
                patch(*replaced)


def kernel_jobs(table: str, directory: Path) -> dict[str, tuple[dict[str, Any], torch.Tensor]]:
    """Decode on kernels in CPU mode; norms whose epsilons differ."""
    made, case = {}, sequences(1, 512, steps=3)
    for name in FAULTS[table]:
        layout, _, pairs = name.partition(" in ")
        config = test_decode_layers.config_of(layout, rms_norm_eps=1e-3)
        options = test_decode_layers.options(layout, 2, batch=1, **(test_decode_layers.PAIRS if pairs else {}))
        source = directory / name
        write_synthetic_checkpoint(source, with_format(config, "bf16"), seed=5)
        one = {"checkpoint": str(source), "neuron_config": options, "cases": [case]}
        made[name] = one, expected_logits(plain_model(source), case)
    return made


@SLOW
@pytest.mark.parametrize("table", FAULTS)
def test_each_fault_is_seen(tmp_path: Path, table: str) -> None:
    if table in SIZES:
        source, way = tmp_path / "source", "executed"
        write_synthetic_checkpoint(source, with_format(tiny_config(**SIZES[table]), "bf16"), seed=4)
        adapters = test_lora.write_all(tmp_path / "lora") if table == "modes" else {}
        jobs = {
            name: test_lora.job(adapters, "source", 1, 2) if name == "adapters" else job(name, source)
            for name in FAULTS[table]
        }
        groups = [jobs]
    else:
        way, groups = "CPU mode", [{name: one} for name, one in kernel_jobs(table, tmp_path).items()]
    found: dict[str, Any] = {}
    for number, group in enumerate(groups):
        torch.save({name: expected for name, (_, expected) in group.items()}, tmp_path / "expected.pt")
        given = {
            "checkpoint": "", "jobs": {name: one for name, (one, _) in group.items()}, "faults": table,
            "expected": str(tmp_path / "expected.pt"),
            "neuron_config": {"tp_degree": max(one["neuron_config"]["tp_degree"] for one, _ in group.values())},
        }  # fmt: skip
        found |= WAYS[way](given, tmp_path / str(number), worker=WORKER, timeout=3000)
    for name, seen in found.items():
        print(f"\n{name}: {', '.join(seen['failing']) or 'not seen'}")
    jobs_as_they_are = {name: found.pop(name)["failing"] for group in groups for name in group}
    assert not any(jobs_as_they_are.values()), jobs_as_they_are
    assert len(found) == sum(map(len, FAULTS[table].values()))
    assert [fault for fault, seen in found.items() if not seen["failing"]] == []
