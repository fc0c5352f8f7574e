"""The ways of serving of cases.py, in CPU mode on gloo ranks and executed from the lowered graphs; the plain model.

CPU mode runs each rank's own Python. It cannot show what a single traced graph gets wrong for ranks other than 0, nor
what torch_xla makes of an operation: its release 2.9 has lost an all-reduce that was viewed after it had been written
in place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from cases import BUCKETS, CASES, job
from harness import SLOW, TOLERANCE, check, execute, launch

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

WORKER = Path(__file__).with_name("cases_worker.py")
CPU_MODE = [
    "arrival TP1", "arrival EP2", "groups TP1", "groups EP2",
    "drafts TP1, four lines", "drafts TP2", "drafts TP2xEP2, four lines",
    "flash TP2", "flash TP4 in pairs", "sequence TP2", "both TP2xEP2",
    *(pytest.param(name, marks=SLOW) for name in ("flash TP2xEP2", "sequence TP4", "prefixes flash TP2xEP2")),
    "prefixes TP1", "prefixes TP2xEP2", "prefixes flash TP2",
]  # fmt: skip
EXECUTED = [
    name for name in CASES
    if not name.startswith(("arrival", "one line", "TP1", "TP2")) and "four lines" not in name
] + ["TP2xEP2"]  # fmt: skip


@pytest.fixture(scope="module")
def source(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of a case: with prefixes one of two layers."""
    directory = tmp_path_factory.mktemp("prefix") / "source"
    config = tiny_config(num_hidden_layers=2, n_routed_experts=72, num_experts_per_tok=8)
    write_synthetic_checkpoint(directory, with_format(config, "bf16"), seed=6)
    return lambda name: directory if name.startswith("prefixes") else checkpoints["bf16"]


@pytest.mark.parametrize("name", CPU_MODE)
def test_cpu_mode(source: Any, tmp_path: Path, name: str) -> None:
    made, expected = job(name, source(name))
    if not name.startswith("prefixes"):  # CPU mode masks whole lengths, whatever the bucket
        for option in BUCKETS:
            made["neuron_config"].pop(option, None)
    (logits,) = launch(made, tmp_path)["logits"]
    check(name, logits, expected)


@pytest.fixture(scope="module")
def executed(request: pytest.FixtureRequest, source: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Outcomes of the executed cases that are to run, from one process."""
    chosen = [item.callspec.params["name"] for item in request.session.items if item.name.startswith("test_executed[")]  # type: ignore[attr-defined]
    directory = tmp_path_factory.mktemp("executed")
    jobs = {name: job(name, source(name)) for name in chosen}
    torch.save({name: expected for name, (_, expected) in jobs.items()}, directory / "expected.pt")
    given = {
        "checkpoint": "", "jobs": {name: made for name, (made, _) in jobs.items()},
        "expected": str(directory / "expected.pt"), "neuron_config": {"tp_degree": 4},
    }  # fmt: skip
    found: dict[str, Any] = execute(given, directory, WORKER, timeout=200 + 60 * len(jobs))
    return found


@pytest.mark.parametrize("name", EXECUTED)
def test_executed(executed: dict[str, Any], name: str) -> None:
    """Prefixes are read from the cache, or computed again where they fit into the bucket: NxDI chooses."""
    found = executed[name]
    print(f"\n{name}: max |difference| to the plain model {found['far']:.1e}")
    assert found["failing"] == []
    assert found["far"] <= TOLERANCE
    calls = {(stage, bucket if isinstance(bucket, int) else tuple(bucket)) for stage, bucket in found["calls"]}
    if name.startswith("prefixes"):
        prefills = {bucket for stage, bucket in calls if stage == "context_encoding_model"}
        assert prefills == {(24, 0), (8, 0), (8, 32), (24, 32)}
    if name.startswith("drafts"):
        assert {stage for stage, _ in calls} == {"context_encoding_model", "speculation_model"}
    if name.startswith(("some lines flash", "some lines sequence")):
        assert {bucket for stage, bucket in calls if stage.startswith("token")} == {32, 512}
