"""A verification step and its drafts in the plan: a head's bytes are its file's, its step is the kernels' schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from command import kimi
from safetensors import safe_open

from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import DraftConfig, Form
from kimi_k2.errors import ConfigError
from kimi_k2.files import Json
from kimi_k2.plan.cost import decode_counts, roofline
from kimi_k2.plan.deployment import load_target
from kimi_k2.plan.drafts import Head
from kimi_k2.plan.machines import TRN2_LNC2
from kimi_k2.plan.measured import Measured, read_measured
from kimi_k2.plan.memory import memory_plan
from kimi_k2.synthetic.draft import draft_fields, write_synthetic_head

MODEL, PRESET = "kimi-k2-instruct-0905", "trn2-tp32-ep2-nki-layers"


def planned(*options: object) -> Json:
    report: Json = json.loads(kimi("plan", MODEL, "--preset", PRESET, "--json", *options).stdout)
    return report


@pytest.fixture(scope="module")
def plain() -> Json:
    return planned()


@pytest.mark.parametrize("form", get_args(Form))
def test_a_heads_bytes_are_those_of_its_file(bf16: Path, tmp_path: Path, form: Form) -> None:
    config = KimiK2Config.from_pretrained(bf16)
    head = Head.of(write_synthetic_head(tmp_path, config, form, draft_vocab_size=32), config)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys() if name != "t2d")  # noqa: SIM118
    target = replace(load_target("h200-tp1", config), head=head, positions=4, context=64)
    assert head.weights(target) == stored
    without = memory_plan(replace(target, head=None))
    entry = config.cache_dim if form == "mla" else 2 * config.num_attention_heads * config.v_head_dim
    assert memory_plan(target).resident - without.resident == stored + 2 * entry * 64


def test_a_step_of_four_positions_reads_four_tokens_experts() -> None:
    config = KimiK2Config.from_preset(MODEL)
    target = load_target(PRESET, config)
    single, four = (decode_counts(replace(target, positions=n)) for n in (1, 4))
    assert four.flops == pytest.approx(4 * single.flops, rel=1e-3)
    assert four.read["cache"] == single.read["cache"]
    experts = r"mlp\.experts.*weight"
    assert four.bytes_read(experts) == pytest.approx(4 * single.bytes_read(experts), rel=1e-3)
    assert sum(four.collectives.values()) == sum(single.collectives.values())


@pytest.mark.parametrize("form", get_args(Form))
def test_effective_tpot_adds_the_heads_runs(form: Form, plain: Json) -> None:
    report = planned("--draft", form)
    drafts = report["drafts"]
    assert plain["drafts"] is None
    assert drafts["positions"] == 4
    assert drafts["plain"] == pytest.approx(plain["kernels"]["contexts"]["4096"]["tpot"])
    assert drafts["verification"] == report["kernels"]["contexts"]["4096"]["tpot"]
    assert drafts["tpot"] == pytest.approx((drafts["verification"] + drafts["drafting"]) / 2.8)
    # Three runs of all but fc in turn, fc twice: a fourth run fills the cache alone.
    config = KimiK2Config.from_preset(MODEL)
    shapes = Head.of(DraftConfig.from_dict(draft_fields(config, form, draft_vocab_size=32000)), config).shapes
    sizes = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
    fc, embedding = sizes.pop("fc.weight"), sizes.pop("embed_tokens.weight")
    filled = sum(
        size for name, size in sizes.items() if any(word in name for word in ("k_proj", "v_proj", "kv_a_", "q_a_"))
    )
    read = 2 * (3 * sum(sizes.values()) + 2 * fc + filled) / 64
    cache = 3 * 4096 * (512 if form == "llama" else 1152)
    rows = 3 * 32000 * 4  # d2t
    assert drafts["bytes_read"] == pytest.approx(read + cache + rows, rel=5e-3)  # and norms
    one = planned("--draft", form, "--draft-tokens", 1)["drafts"]  # without the two runs from the head's own states
    assert (one["positions"], one["runs"]) == (2, 2)
    own = 2 * 2 * sum(sizes.values()) / 64 + 2 / 3 * (cache + rows)
    assert drafts["bytes_read"] - one["bytes_read"] == pytest.approx(own, rel=5e-3)
    assert embedding // 64 < drafts["weights"]
    assert drafts["collectives"] == (18 if form == "llama" else 22)
    if form == "llama":  # of the lowered graph, test/nxd/graphs.py
        assert drafts["weights"] + 4096 * 512 == 76_198_912  # with its cache


NCCOM = {
    "results": [
        {"size(B)": 1024, "count(elems)": 256, "type": "fp32", "algbw(GB/s)": 0.16, "time:avg(us)": 6.0},
        {"size(B)": 60000, "count(elems)": 15000, "type": "fp32", "algbw(GB/s)": 8.0, "time:avg(us)": 10.0},
        {"size(B)": 1000000, "count(elems)": 250000, "type": "fp32", "algbw(GB/s)": 22.7, "time:avg(us)": 30.0},
    ]
}  # the form in nccom-test.rst
PROFILE = {"summary": [{"hbm_read_bytes": 400, "hbm_write_bytes": 4 * 28.8, "dma_active_time": 1e-9, "total_time": 1}]}


def test_measured_figures_stand_for_those_assumed(tmp_path: Path, plain: Json) -> None:
    for name, content in (("nccom.json", NCCOM), ("profile.json", PROFILE)):
        (tmp_path / name).write_text(json.dumps(content))
    report = planned("--measured", tmp_path / "nccom.json", "--measured", tmp_path / "profile.json")
    step, of_plain = (plan_of["kernels"]["contexts"]["4096"] for plan_of in (report, plain))
    # 515.2 GB/s are 70 % of twice 368; a layer's all-reduce has 60,416 bytes.
    assert report["kernels"]["rates"]["efficiency"] == pytest.approx(70)
    counted, others = of_plain["layer"]["layer_us"]["70"]["10"] * 1e-6, report["kernels"]["other_bytes"] / 515.2e9
    assert step["tpot"] == pytest.approx(61 * counted + others + 5 * 10e-6, rel=1e-3)
    # 127 collectives; at 105 us they are all that a layer waits for.
    low, reported, high = of_plain["range"]
    assert [round(row["latency"] * 1e6) for row in of_plain["range"]] == [15, 24, 105]
    assert low["tpot"] == of_plain["tpot"] < reported["tpot"] < high["tpot"]
    assert high["tpot"] - reported["tpot"] == pytest.approx(127 * (105.03 - 24) * 1e-6, rel=0.01)
    for row in of_plain["range"]:
        assert row["charged"] > row["tpot"]  # weights that wait for a collective
    assert high["charged"] - low["charged"] == pytest.approx(127 * (105.03 - 15) * 1e-6)
    assert any("70 % of 368 GB/s a core (measured)" in line for line in report["kernels"]["assumptions"])
    assert "as measured (nccom-test)" in report["machine"]["source"]
    measured = read_measured([tmp_path / "nccom.json"])
    machine = measured.on(TRN2_LNC2)
    sizes = (100, 1024, 30512, 60000, 2000000)
    assert [machine.seconds_of(size) * 1e6 for size in sizes] == pytest.approx([6, 6, 8, 10, 60])
    config = KimiK2Config.from_preset(MODEL)
    target = load_target(PRESET, config)
    counts = decode_counts(target)
    times = sum(n * machine.seconds_of(row.nbytes) for row, n in counts.collectives.items())
    assert roofline(counts, machine).communication == pytest.approx(times)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "nccom-test's --report-to-json-file"),
        ({"results": []}, "results'.*at least 1 item"),
        ({"results": [{"size(B)": 8}]}, "time:avg"),
        ({"results": [{"size(B)": 8, "time:avg(us)": 0}]}, "greater than 0, got 0"),
        ({"results": [{"size(B)": 8, "time:avg(us)": float("inf")}]}, "finite number, got inf"),
        ({"dma_active_time": 1e-3, "hbm_read_bytes": "x"}, "hbm_read_bytes"),
        ({"dma_active_time": 1e-3, "hbm_read_bytes": 9e9, "hbm_write_bytes": 1}, "at most 725 GB/s"),
    ],
)
def test_other_files_are_refused_by_field(tmp_path: Path, content: Json, says: str) -> None:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=says):
        read_measured([path]).on(TRN2_LNC2)
    with pytest.raises(ConfigError, match="no such file"):
        read_measured([tmp_path / "none.json"])
    assert Measured().on(TRN2_LNC2) == TRN2_LNC2
