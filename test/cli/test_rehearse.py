"""`rehearse`: its small model has sizes that each family of presets takes, and its commands run to the end."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from command import kimi

from kimi_k2.cli.commands import rehearse
from kimi_k2.config import KimiK2Config
from kimi_k2.plan.deployment import Deployment, load_target, make_target
from kimi_k2.plan.measured import REHEARSAL, checksum
from kimi_k2.plan.memory import memory_plan
from kimi_k2.synthetic.config import tiny_config

# One of each layout and format: other presets differ in lengths alone.
FAMILIES = ("h200-tp8", "h200-ep8", "trn2-tp64-ep1", "trn2-tp32-ep2", "trn2-tp64-ep1-images", "trn2-tp32-ep2-b32-4k",
            "trn2-tp64-ep1-nki-layers-128k")  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_every_preset_takes_the_small_model(name: str) -> None:
    preset = Deployment.load(name)
    config = rehearse.small_config(preset)
    target = make_target(preset, config)
    assert memory_plan(target).fits


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of steps, which run in this process: that spares their imports. There is no NxD."""
    names: list[str] = []

    def run(step: rehearse.Step, log: Path, outputs: dict[str, str]) -> str:
        done = kimi(*shlex.split(step.line), status=None)
        names.append(step.name)
        return "ok" if done.exit_code == 0 else f"failed with {done.exit_code}: {done.output}"

    monkeypatch.setattr(rehearse, "_run", run)
    monkeypatch.setattr("kimi_k2.neuron.contrib.missing", lambda: ["torch_xla"])
    return names


def test_the_way_of_a_preset(tmp_path: Path, ran: list[str]) -> None:
    """What needs NxD or a device is skipped by name."""
    kimi("rehearse", "--preset", "trn2-tp32-ep2", "--out", tmp_path)
    assert ran[:5] == ["plan", "convert", "verify", "generate with the plain model", "parity capture"]
    assert len(list((tmp_path / "ranks" / "weights").iterdir())) == 64
    report = json.loads((tmp_path / "report.json").read_text())
    results = {step["step"]: step["result"] for step in report["steps"]}
    assert results["compile"] == "skipped: not importable here: torch_xla"
    assert "kimi-k2 compile /models/MODEL --preset trn2-tp32-ep2 --out /presharded" in report["real"]
    assert report["device"] is None and report["checksum"] == checksum(report)


@pytest.mark.usefixtures("ran")
def test_one_chip_without_a_chip(tmp_path: Path) -> None:
    """Both forms, four ranks each, small widths; the report is whole but for the device's fields."""
    kimi("rehearse", "--on-device", "--out", tmp_path)
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) == {"schema", "models", "versions", "steps", "expected", "device", "logits", "real", "checksum"}
    assert report["device"] is None and set(report["expected"]) == {"xla", "layers"}
    assert report["expected"]["layers"]["tpot"]["expected"]["form"] == "whole layers"
    for form in ("xla", "layers"):
        assert len(list((tmp_path / f"ranks-{form}" / "weights").iterdir())) == 4
    kimi("rehearse", "--on-device", "--preset", "trn2-tp32-ep2", status=2)


def test_a_plan_reads_a_report(tmp_path: Path) -> None:
    """Collectives of nccom-test in it; a changed report, and one without a device, are refused by name."""
    file, rows = (
        tmp_path / "report.json",
        [{"size(B)": 1024, "time:avg(us)": 40.0}, {"size(B)": 65536, "time:avg(us)": 60.0}],
    )
    report: dict[str, Any] = {"schema": REHEARSAL, "device": {"collectives": rows}}
    words = ["plan", "kimi-k2-instruct-0905", "--json", "--measured", str(file)]
    file.write_text(json.dumps({**report, "checksum": checksum(report)}))
    found = json.loads(kimi(*words).stdout)
    assert dict(found["machine"]["collectives"]) == pytest.approx({1024: 40e-6, 65536: 60e-6})
    assert found["tpot"]["bound"] > 8e-3  # 186 collectives of 40 us and more
    for changed, says in (({**report, "device": None}, "nothing was measured"), (report, "was changed")):
        given = {**changed, "checksum": checksum(changed) if changed["device"] is None else "0"}
        file.write_text(json.dumps(given))
        refused = kimi(*words, status=None)
        assert refused.exit_code != 0 and says in str(refused.exception)


@pytest.mark.parametrize("slices", [rehearse.SLICES, dict.fromkeys(rehearse.FORMS, rehearse.SMALL_SLICE)])
def test_a_chip_holds_what_four_of_64_ranks_hold(slices: dict[str, dict[str, int]], tmp_path: Path) -> None:
    """A rank's tensors of a layer have the shapes of the real deployment's, at the real widths without the kernel."""
    real = KimiK2Config.from_preset("kimi-k2-instruct-0905")
    for form, name in rehearse.FORMS.items():
        config = tiny_config("kimi-k2-instruct-0905", **slices[form])
        file = tmp_path / "chip.yaml"
        file.write_text(f"like: {name}\ntp_degree: 4\nmoe_tp_degree: 4\n")
        chip, whole = load_target(str(file), config), load_target(name, real)
        assert memory_plan(chip).fits
        shapes, wanted = (
            {tensor.name: tensor.local_shape for tensor in target.sharding.layer(1)} for target in (chip, whole)
        )
        assert set(shapes) == set(wanted)
        if slices[form] is rehearse.SLICE:
            # These are divided over all ranks, of which there are fewer.
            assert all("qkv_a" in weight for weight in shapes if shapes[weight] != wanted[weight])


def test_a_step_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearse, "_run", lambda step, log, outputs: "failed with 1: error: no")
    done = kimi("rehearse", "--preset", "h200-tp8", "--out", tmp_path, status=1)
    assert "[1/" in done.output
    assert "[2/" not in done.output
