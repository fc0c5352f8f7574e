"""Every fault that mutations_worker.py puts into the class is seen by a check, and the class as it is by none."""

from __future__ import annotations

from pathlib import Path

import torch
from harness import SLOW, run_executed

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format


@SLOW
def test_each_fault_is_seen(tmp_path: Path) -> None:
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0)
    write_synthetic_checkpoint(tmp_path / "source", with_format(config, "bf16"), seed=4)
    worker, output = Path(__file__).with_name("mutations_worker.py"), tmp_path / "output.pt"
    run_executed([str(worker), str(tmp_path / "source"), str(output)], ranks=2, timeout=1800)
    table = torch.load(output)
    for name, seen in table.items():
        print(f"\n{name}: {', '.join(seen) or 'not seen'}")
    assert table.pop("none") == []
    assert len(table) >= 25
    assert [name for name, seen in table.items() if not seen] == []


@SLOW
def test_each_fault_of_a_split_is_seen(tmp_path: Path) -> None:
    """Flash decoding and sequence parallelism; a layer without experts, whose MLP is split too, and one with."""
    write_synthetic_checkpoint(tmp_path / "source", with_format(tiny_config(num_hidden_layers=2), "bf16"), seed=4)
    worker, output = Path(__file__).with_name("split_mutations_worker.py"), tmp_path / "output.pt"
    run_executed([str(worker), str(tmp_path / "source"), str(output)], ranks=4, timeout=1800)
    table = torch.load(output)
    for name, difference in table.items():
        print(f"\n{name}: {difference:.1e}")
        assert (difference <= 2e-5) == name.startswith("none"), name
    assert len(table) >= 15
