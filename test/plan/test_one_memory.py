"""One memory model: whatever prints a rank's bytes prints the same ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib.axes
import pytest
import torch
from command import kimi

from kimi_k2.config import KimiK2Config, raw_preset
from kimi_k2.errors import DoesNotFitError
from kimi_k2.model.cache import LatentCache, kv_cache_dtype
from kimi_k2.neuron.compile import check_fit
from kimi_k2.plan.deployment import Deployment, load_target, preset_names
from kimi_k2.plan.machines import GIB
from kimi_k2.plan.memory import memory_plan
from kimi_k2.plan.report import plot
from kimi_k2.serving.command import gpu_lengths

MODEL = "kimi-k2-instruct-0905"


def printed(*words: str) -> str:
    return kimi("plan", MODEL, *words, status=None, env={"COLUMNS": "200"}).stdout


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, object]]:
    return {row["target"]["name"]: row for row in json.loads(printed("--all-presets", "--json"))}


@pytest.mark.parametrize("name", preset_names())
def test_plan_table_compile_and_chart_have_one_figure(
    name: str, rows: dict[str, dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = json.loads(printed("--preset", name, "--json"))
    memory, row = report["rank_memory"], rows[name]
    assert (row["rank_memory"], row["tpot"]) == (memory, report["tpot"])
    assert printed("--preset", name).splitlines()[0].endswith(memory["verdict"])
    config, preset = KimiK2Config.from_preset(MODEL), Deployment.load(name)
    if preset.hardware.target == "neuron" and preset.vision is None:
        try:
            assert check_fit(config, preset).verdict == memory["verdict"]
        except DoesNotFitError as error:
            assert memory["verdict"] in str(error)
    drawn: dict[str, float] = {}
    bar = matplotlib.axes.Axes.bar

    def sums(axes: Any, labels: Any, heights: Any, *args: Any, **options: Any) -> Any:
        for label, height in [(labels, heights)] if isinstance(labels, str) else zip(labels, heights, strict=True):
            drawn[label] = drawn.get(label, 0.0) + height
        return bar(axes, labels, heights, *args, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "bar", sums)
    plot(load_target(name, config), tmp_path / "chart.png")
    asked = next(height for label, height in drawn.items() if "asked for" in label)
    assert asked == pytest.approx(memory["needed"] / GIB, rel=1e-9)


@pytest.mark.parametrize(
    ("model", "fp8_cache"),
    [(MODEL, False), ("kimi-k2-thinking", False), ("kimi-k2-thinking", True), ("kimi-k2.5", False)],
)
def test_gpus_are_planned_as_they_are_served(model: str, fp8_cache: bool, tmp_path: Path) -> None:
    """Of eight H200s: `plan`, `plan --gpus`, `serve`, and the cache that is made; workspaces in all of them."""
    raw, config = raw_preset(model), KimiK2Config.from_preset(model)
    if fp8_cache:
        raw["quantization_config"]["kv_cache_scheme"] = {"type": "float", "num_bits": 8, "strategy": "tensor"}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        model, config = str(tmp_path), KimiK2Config.from_pretrained(tmp_path)
    lengths = ["--max-model-len", "4096", "--json", "--batch-size"]
    table = json.loads(kimi("plan", model, "--gpus", *lengths, "1").stdout)["modelled"]
    # A request a GPU.
    planned = json.loads(kimi("plan", model, "--preset", "h200-tp8", *lengths, "8", status=None).stdout)
    row = next(row for row in table if (row["gpu"], row["way"]) == ("h200", "TP8"))
    assert row["needed"] == planned["rank_memory"]["needed"] and row["usable"] == planned["rank_memory"]["usable"]
    memory = load_target("h200-tp8", config).memory
    ranks, tokens = gpu_lengths(config, 8, memory.total, None)
    assert ranks == 8
    dtype = kv_cache_dtype("auto", config) or torch.bfloat16
    made = LatentCache(config, 8, 4096, dtype=dtype, device="meta")
    assert planned["rank_memory"]["parts"]["KV cache"] == made.data.nbytes
    most = planned["rank_memory"]["cache_tokens"]
    assert tokens == min(config.max_position_embeddings, most // 1024 * 1024)


def test_the_verdict_has_three_forms() -> None:
    config = KimiK2Config.from_preset(MODEL)
    target = load_target("trn2-tp32-ep2", config)
    for context, begins in ((512, "fits: "), (4096, "fits if scratch stays below 7.5 GiB"), (32768, "does not fit: ")):
        plan = memory_plan(replace(target, context=context))
        assert plan.verdict.startswith(begins)
        assert (plan.fits, plan.certain) == (context < 32768, context == 512)
