"""Every fault of the tables is seen by the case that it is listed with, and the class as it is by none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SLOW, run_executed

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

# What experts in tiles and the kernels take.
TILED = {"moe_intermediate_size": 64, "num_experts_per_tok": 8, "kv_lora_rank": 128}
# Ranks, model (layers without experts, whose MLP is split too, and with), and the least number of faults.
TABLES: dict[str, tuple[int, dict[str, Any], int]] = {
    "class_faults": (2, {"num_hidden_layers": 1, "first_k_dense_replace": 0}, 26),
    "early_faults": (2, {**TILED, "num_hidden_layers": 1, "first_k_dense_replace": 0}, 9),
    "early_qkv_a_faults": (2, TILED, 18),
    "split_faults": (4, {"num_hidden_layers": 2}, 15),
    "feature_faults": (4, {"num_hidden_layers": 2}, 20),
}


def test_each_fault_still_applies() -> None:
    """A fault replaces a piece of the class's source, which must be there."""
    run_executed([str(Path(__file__).with_name("faults_worker.py")), *TABLES], ranks=1)


@SLOW
@pytest.mark.parametrize("name", TABLES)
def test_each_fault_is_seen(tmp_path: Path, name: str) -> None:
    ranks, sizes, least = TABLES[name]
    write_synthetic_checkpoint(tmp_path / "source", with_format(tiny_config(**sizes), "bf16"), seed=4)
    worker, output = Path(__file__).with_name("faults_worker.py"), tmp_path / "output.pt"
    run_executed([str(worker), name, str(tmp_path / "source"), str(output)], ranks, timeout=3000)
    table: dict[str, list[str]] = torch.load(output)
    for fault, seen in table.items():
        print(f"\n{fault}: {', '.join(seen) or 'not seen'}")
    assert {fault: seen for fault, seen in table.items() if seen and fault.startswith("none")} == {}
    faults = [fault for fault in table if not fault.startswith("none")]
    assert len(faults) >= least
    assert [fault for fault in faults if not table[fault]] == []
