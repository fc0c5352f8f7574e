"""Published decode steps: bounds below all of them, the Kimi runs within what the others foretell, the fit itself."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from command import kimi

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.comparison import comparison, held_out
from kimi_k2.plan.deployment import load_target
from kimi_k2.plan.published import WIDE, data, expect, features, fit, rows_of, runs
from kimi_k2.plan.report import plan

FORMS = ("xla", "kernels", "whole layers")


def test_every_bound_lies_below_its_published_time() -> None:
    assert len(runs()) == 59
    for run in runs():
        assert run.bound_ms < run.tpot_ms, run.name


def test_the_files_bytes_are_those_of_our_own_plan() -> None:
    """Kimi's sizes in published.json against the planner's, in the published port's arrangement: all local experts."""
    run = next(run for run in runs() if run.name.startswith("Kimi-K2-0905 TP32/EP2"))
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905")
    held = plan("kimi-k2-instruct-0905", "trn2-tp32-ep2", max_model_len=1024)["rank_memory"]["parts"]["expert weights"]
    assert run.expert_read == pytest.approx(held, rel=1e-9)
    sizes = run.sizes
    assert (sizes.layers, sizes.experts, sizes.chosen) == (61, config.n_routed_experts, config.num_experts_per_tok)
    # Active parameters less routed ones and the embedding, which is not read.
    dense = 32.86e9 - 60 * 8 * sizes.expert - sizes.vocabulary * sizes.hidden
    counted = (
        61 * sizes.attention + 60 * (sizes.shared + 384 * 7168) + sizes.dense_mlp + sizes.vocabulary * sizes.hidden
    )
    assert counted == pytest.approx(dense, rel=0.01)
    # What a context of twice the length reads more: the cache, BF16 values of each layer and sequence.
    longer = replace(run, context=2 * run.context).bytes_read - run.bytes_read
    assert longer == 61 * run.batch * run.context * config.cache_dim * 2 * run.cache_copies


@pytest.mark.parametrize("name", [run.name for run in runs() if run.model in ("Kimi-K2", "DeepSeek-V3")])
def test_kimi_and_deepseek_held_out_lie_within_the_range(name: str) -> None:
    run = next(run for run in runs() if run.name == name)
    if run.set_apart:
        assert run.set_apart == "first token inside"
        return
    assert all(other.model != run.model for other in fit(run.form, run.model).rows)
    expected = held_out(run)
    assert expected.low <= run.tpot_ms / 1e3 <= expected.high


@pytest.mark.parametrize("form", FORMS)
def test_the_fit_is_the_least_square_and_the_range_what_leaving_out_gives(form: str) -> None:
    """Against 4,000 random terms around it, and against fits of the models left out one at a time."""
    found, rows = fit(form), rows_of(form)
    x, times = np.array([features(run) for run in rows]), np.log([run.tpot_ms / 1e3 for run in rows])

    def error(terms: np.ndarray) -> np.ndarray:
        return np.square(times - np.log(x @ terms.T).T).sum(-1)  # type: ignore[no-any-return]

    best = error(np.array([found.terms]))[0]
    drawn = np.exp(np.random.default_rng(0).normal(0, 0.3, (4000, 3))) * found.terms
    drawn[:, :2] = np.maximum(drawn[:, :2], 1)
    assert error(drawn).min() > best * (1 - 1e-6)
    apart = []
    for run in rows:
        others = fit(form, run.model)
        ratio = run.tpot_ms / 1e3 / np.dot(others.terms, features(run))
        apart.append(abs(np.log(ratio)))
        assert found.left_out[run.name] == pytest.approx(ratio, rel=1e-3)
    within = sum(error_of <= np.log(found.factor) * (1 + 1e-3) for error_of in apart)
    assert within == int(np.ceil(0.9 * len(rows)))


def test_what_is_set_apart_has_its_cause_in_the_file() -> None:
    causes = data()["rules"]["set_apart"]
    assert {run.set_apart for run in runs() if run.set_apart} == set(causes)
    assert all(run.source in data()["sources"] for run in runs())
    assert not any(run.set_apart for form in FORMS for run in rows_of(form))


def test_a_plan_says_bound_expectation_nearest_run_and_width() -> None:
    report = plan("kimi-k2-instruct-0905", "trn2-tp32-ep2")
    tpot, expected = report["tpot"], report["tpot"]["expected"]
    assert tpot["bound"] < expected["if_scales_fuse"]["seconds"] < expected["seconds"]
    assert [run["run"][:9] for run in expected["nearest"]] == ["Kimi-K2.5", "Kimi-K2.6"]
    assert expected["wide"] == (expected["factor"] > WIDE)
    shown = kimi("plan", "kimi-k2-instruct-0905").output
    assert f"expected {expected['seconds'] * 1e3:.0f} ms" in shown and "wider than 1.6" in shown
    assert "pull request 145" in expected["nearest"][0]["source"]
    # FP8 a channel has no block scales; whole layers are another form; a GPU has no published run here.
    assert plan("kimi-k2-instruct-0905", "trn2-tp64-ep1")["tpot"]["expected"]["if_scales_fuse"] is None
    assert plan("kimi-k2-instruct-0905", "trn2-tp32-ep2-nki-layers")["tpot"]["expected"]["form"] == "whole layers"
    assert plan("kimi-k2-instruct-0905", "h200-tp8")["tpot"]["expected"] is None


def test_an_expectation_of_a_published_graph_is_the_fits() -> None:
    """K2.5's graph is nearly TP64/EP1 of ours but for what that port reads more: no faster than ours may be."""
    config = KimiK2Config.from_preset("kimi-k2.5")
    report = plan("kimi-k2.5", "trn2-tp64-ep1")
    run = next(run for run in runs() if run.name.startswith("Kimi-K2.5"))
    theirs = np.dot(fit("xla").terms, features(run))
    assert report["tpot"]["expected"]["seconds"] == pytest.approx(theirs, rel=0.35)
    assert expect(load_target("h200-tp8", config), None) is None  # type: ignore[arg-type]
    most = plan("kimi-k2-instruct-0905", max_model_len=131072, batch_size=2**31 - 1)
    assert most["tpot"]["expected"] and not most["rank_memory"]["fits"]


def test_published_runs_print_as_json() -> None:
    found = json.loads(kimi("plan", "kimi-k2-instruct-0905", "--json").stdout)["published"]
    assert found == json.loads(json.dumps(comparison()))
    assert len(found["steps"]) == 59
    assert [row["published"] for row in found["memory"]] == [17.55, 20.9, 21.9, 23.4]
    assert all(abs(row["difference"]) < 0.05 for row in found["memory"])
    judged = [row for row in found["steps"] if row["within"] is not None]
    assert sum(row["within"] for row in judged) >= 0.8 * len(judged)
    assert {row.get("tpot_ms") for row in found["gpus"]} >= {6.99, 29.1}
