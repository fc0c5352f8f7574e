"""`rehearse`: its small model has sizes that each family of presets takes, and its commands run to the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_k2.cli import app
from kimi_k2.cli.commands import rehearse
from kimi_k2.plan.deployment import Deployment
from kimi_k2.plan.memory import memory_plan
from kimi_k2.plan.target import make_target
from kimi_k2.sharding.plan import make_plan

# One of each layout and format: other presets differ in lengths alone.
FAMILIES = ("h200-tp8", "h200-ep8", "trn2-tp64-ep1", "trn2-tp32-ep2", "trn2-tp64-ep1-images", "trn2-tp32-ep2-b32-4k",
            "trn2-tp64-ep1-nki-layers-128k")  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_every_preset_takes_the_small_model(name: str) -> None:
    preset = Deployment.load(name)
    config = rehearse.small_config(preset)
    plan = make_plan(config, preset.layout(config))
    plan.check()
    assert memory_plan(config, make_target(preset, config), plan).fits


def test_the_way_of_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands in this process, which spares their imports; what needs NxD or a device is skipped by name."""
    ran: list[str] = []

    def run(step: rehearse.Step, log: Path, outputs: dict[str, str]) -> str:
        done = CliRunner().invoke(app, step.words)
        ran.append(step.name)
        return "ok" if done.exit_code == 0 else f"failed with {done.exit_code}: {done.output}"

    monkeypatch.setattr(rehearse, "_run", run)
    monkeypatch.setattr("kimi_k2.neuron.contrib.missing", lambda: ["torch_xla"])
    done = CliRunner().invoke(app, ["rehearse", "--preset", "trn2-tp32-ep2", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert ran[:5] == ["plan", "convert", "verify", "generate with the plain model", "parity capture"]
    assert len(list((tmp_path / "ranks" / "weights").iterdir())) == 64
    report = (tmp_path / "report.md").read_text()
    assert "| compile | skipped: not importable here: torch_xla |" in report
    assert "kimi-k2 compile /models/MODEL --preset trn2-tp32-ep2 --out /presharded" in report


def test_a_step_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "_run", lambda step, log, outputs: "failed with 1: error: no")
    done = CliRunner().invoke(app, ["rehearse", "--preset", "h200-tp8", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "[1/" in done.output
    assert "[2/" not in done.output
