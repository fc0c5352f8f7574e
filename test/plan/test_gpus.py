"""Layouts of GPUs side by side: weights are the published checkpoints', bounds lie above the published records."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from command import kimi

from kimi_k2.bench.kernels.profile import floor
from kimi_k2.config import KimiK2Config
from kimi_k2.plan.memory import WORKSPACE_BYTES
from kimi_k2.plan.presets import ServedRow, served_rows
from kimi_k2.sharding.layout import Layout

Rows = dict[tuple[str, str, str], list[ServedRow]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    found: Rows = {}
    for model in ("kimi-k2-instruct-0905", "kimi-k2.5"):
        for row in served_rows(KimiK2Config.from_preset(model), 4096):
            found.setdefault((model, row.gpu, row.way), []).append(row)
    return found


def test_weights_are_the_published_checkpoints(rows: Rows) -> None:
    for model, total, whole in (("kimi-k2-instruct-0905", 1029.2e9, 11.7e9), ("kimi-k2.5", 595.2e9, 2 * 11.7e9)):
        eight = rows[model, "h200", "TP8"][0]
        assert 8 * eight.weights == pytest.approx(total, rel=0.04)  # norms, router and tower are on each
        assert rows[model, "h200", "TP8 x PP2"][0].weights == eight.weights // 2
        # All but the routed experts on every GPU; embedding and head are BF16 in both.
        for gpus in (8, 16, 32):
            shared = rows[model, "h200", f"DP{gpus}+EP{gpus}"][0].weights
            dense = shared - (total - whole) / gpus
            assert dense == pytest.approx(whole, rel=0.25), (model, gpus)


def test_bounds_lie_above_what_others_reached(rows: Rows) -> None:
    """2,200 tokens/s an H200 and 22,300 on 8 H100s of DeepSeek-V3, whose active parameters are more; 14 at one user."""
    best = {gpu: max(row.tokens for key, found in rows.items() if key[1] == gpu for row in found) for gpu in
            ("h100", "h200")}  # fmt: skip
    assert 2200 < best["h200"] < 10000
    assert best["h100"] < best["h200"]
    single = served_rows(KimiK2Config.from_preset("kimi-k2.5"), 4096, 1)
    assert all(row.requests == 1 for row in single)
    tp8 = next(row for row in single if (row.gpu, row.way) == ("h200", "TP8"))
    assert tp8.tokens > 14


def test_what_fits_is_shown_up_to_the_most(rows: Rows) -> None:
    assert [row.fits for row in rows["kimi-k2-instruct-0905", "h100", "TP8"]] == [False]
    assert [row.fits for row in rows["kimi-k2.5", "h100", "TP8"]] == [False]  # by an engine's workspaces
    for found in rows.values():
        assert len(found) == 1 or all(row.fits for row in found)
        last = found[-1]
        if last.fits and last.requests < 512:
            assert last.needed + (last.needed - last.weights - WORKSPACE_BYTES) / last.requests > last.usable
        # A step of more sequences reads and takes more, and makes more tokens.
        for less, more in pairwise(found):
            assert more.read > less.read
            assert more.tpot > less.tpot
            assert more.tokens > less.tokens


def test_the_command_prints_rows_and_records() -> None:
    words = ["plan", "kimi-k2-thinking", "--gpus", "--batch-size", "64", "--max-model-len", "8192"]
    result = kimi(*words, "--json")
    printed = json.loads(result.output)
    assert {row["way"] for row in printed["modelled"]} >= {"TP8", "DP8+EP8", "TP8 x PP2", "DP16+EP16", "DP32+EP32"}
    assert {row["gpu"] for row in printed["modelled"]} == {"h100", "h200", "b200", "gb300"}
    assert {row["requests"] for row in printed["modelled"]} == {64}
    table = kimi(*words, env={"COLUMNS": "170"})
    assert "DP32+EP32" in table.output
    assert "2,200 tokens/s a GPU (reported)" in table.output
    assert f"with caches and {WORKSPACE_BYTES / 2**30:.1f} GiB of an engine's" in " ".join(table.output.split())


@pytest.mark.parametrize(("requests", "milliseconds"), [(1, 1.76), (16, 13.2), (64, 33.4)])
def test_a_profiled_steps_floor_is_its_bytes(requests: int, milliseconds: float) -> None:
    """Floors of 61 layers at 3.07 TB/s, computed apart when an H100 was measured."""
    config, card = KimiK2Config.from_preset("kimi-k2-instruct-0905"), "NVIDIA H100 80GB HBM3"
    layout = Layout(8, 1, "cuda", "stored")
    seconds, read = floor(config, layout, card, [1024] * requests)
    assert read / 3.07e9 == pytest.approx(milliseconds, rel=0.03)
    assert seconds == pytest.approx(read / 3.35e12)
    half = floor(config, layout, card, [1024] * requests, cache_bytes=1)[1]
    assert read - half == 61 * 576 * 1024 * requests
    few, experts = floor(config, layout, card, [1024] * requests, distinct=8)[1], 60 * 3 * 7168 * 2048 // 8
    assert read - few == pytest.approx(experts * (384 * (1 - (376 / 384) ** requests) - 8), rel=0.01, abs=1e6)


def test_machines_to_plan_for_alone() -> None:
    """Trn3 fits more and reads faster than trn2; nothing compiles or runs for it, by name."""
    model = "kimi-k2-instruct-0905"
    three, two = (json.loads(kimi("plan", model, "--preset", f"trn{n}-tp64-ep1", "--json").stdout) for n in (3, 2))
    assert three["rank_memory"]["certain"] and not two["rank_memory"]["certain"]
    assert three["decode"]["bytes_read"] == two["decode"]["bytes_read"]
    assert three["tpot"]["bound"] < two["tpot"]["bound"] and three["tpot"]["expected"] is None
    for words in (["compile", model, "--hlo-only"], ["rehearse"]):
        refused = kimi(*words, "--preset", "trn3-tp64-ep1", status=None)
        assert refused.exit_code != 0 and "plan only" in str(refused.exception), words


def test_blackwell_holds_and_reads_more_than_hopper(rows: Rows) -> None:
    for model in ("kimi-k2-instruct-0905", "kimi-k2.5"):
        hopper, blackwell, rack = (rows[model, gpu, "TP8"][0] for gpu in ("h200", "b200", "gb300"))
        assert hopper.usable < blackwell.usable < rack.usable and hopper.weights == rack.weights
        assert rack.fits and blackwell.fits
