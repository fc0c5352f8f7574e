"""Names, contents and selection of the expert kernels' launch choices."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from kimi_k2.bench.kernels.tune import for_each_count
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KernelError
from kimi_k2.kernels.experts import tuning as moe_tuning
from kimi_k2.kernels.experts.tuning import (
    DIRECTORY,
    NAME,
    ExpertChoice,
    choose,
    default_choice,
    file_name,
    load_choices,
)
from kimi_k2.kernels.experts.w4a16 import check_choice

SHAPES = [(384, 256, 8), (48, 2048, 1), (384, 128, 8), (8, 512, 2)]


@pytest.mark.parametrize("path", sorted(DIRECTORY.glob("*")), ids=lambda path: path.name)
def test_shipped_files_keep_the_contract(path: Path) -> None:
    named = NAME.fullmatch(path.name)
    assert named is not None
    experts, inter, hidden = (int(v) for v in named.groups()[:3])
    choices = load_choices(path)
    assert choices, "an empty file would silence the warning about defaults"
    top_k = 8 * experts // 384  # pairs that arrive for a token
    for tokens, choice in choices.items():
        choice.check(tokens, top_k, hidden, inter)


@pytest.mark.parametrize(("experts", "inter", "top_k"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 64, 65, 512, 513, 4096, 16384])
def test_defaults_are_always_launchable(experts: int, inter: int, top_k: int, tokens: int) -> None:
    for hidden in (256, 7168):
        default_choice(tokens, top_k, experts, inter, hidden).check(tokens, top_k, hidden, inter)


def test_nearest_count_above_serves_and_defaults_warn_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_tuning, "DIRECTORY", tmp_path)
    moe_tuning._table.cache_clear()
    name = moe_tuning.file_name(8, 256, 512, "fp8_e4m3", "128x128", "NVIDIA H200")
    assert name == "experts=8,inter=256,hidden=512,dtype=fp8_e4m3,block=128x128,device=NVIDIA_H200.json"
    small, large = ExpertChoice(True, 16, 2, 1, 1), ExpertChoice(False, 64, 1, 1, 2)
    moe_tuning.save_choices(tmp_path / name, {2: small, 4: small, 128: large, 256: large})
    assert load_choices(tmp_path / name) == {4: small, 256: large}
    again = for_each_count(load_choices(tmp_path / name))
    assert again == dict.fromkeys((1, 2, 4), small) | dict.fromkeys((8, 16, 32, 64, 128, 256), large)
    keys = {"dtype": "fp8_e4m3", "block": "128x128", "device": "NVIDIA H200"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(1, 2, 8, 256, 512, **keys) == small
        assert choose(5, 2, 8, 256, 512, **keys) == large
        assert choose(9999, 2, 8, 256, 512, **keys) == large
    keys["device"] = "another"
    with pytest.warns(UserWarning, match="kimi-k2 tune"):
        choose(1, 2, 8, 256, 512, **keys)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(1, 2, 8, 256, 512, **keys)
    moe_tuning._table.cache_clear()


def test_tuned_fused_entry_is_not_used_beyond_its_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_tuning, "DIRECTORY", tmp_path)
    moe_tuning._table.cache_clear()
    name = moe_tuning.file_name(8, 256, 512, "fp8_e4m3", "128x128", "x")
    moe_tuning.save_choices(tmp_path / name, {64: ExpertChoice(True, 16, 1, 1, 1)})
    choice = choose(1000, 8, 8, 256, 512, dtype="fp8_e4m3", block="128x128", device="x")
    assert not choice.fused
    moe_tuning._table.cache_clear()


def test_broken_files_are_refused(tmp_path: Path) -> None:
    good = "experts=8,inter=256,hidden=512,dtype=fp8_e4m3,block=128x128,device=x.json"
    (tmp_path / good).write_text(json.dumps({"1": {"fused": True}}))
    with pytest.raises(KernelError, match="entry '1'"):
        load_choices(tmp_path / good)
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(KernelError, match="file name"):
        load_choices(tmp_path / "wrong.json")


@pytest.mark.parametrize(
    ("choice", "field"),
    [
        (ExpertChoice(True, 32, 1, 1, 1), "max_tokens"),
        (ExpertChoice(False, 32, 0, 1, 1), "splits1"),
        (ExpertChoice(False, 32, 1, 3, 1), "splits2"),
        (ExpertChoice(False, 32, 1, 1, 5), "item_slabs"),
    ],
)
def test_check_names_the_field(choice: Any, field: str) -> None:
    with pytest.raises(KernelError, match=field):
        choice.check(64, 8, 7168, 256)


def test_fused_refuses_more_pairs_than_a_block_aligns() -> None:
    with pytest.raises(KernelError, match="512"):
        ExpertChoice(True, 16, 1, 1, 1).check(65, 8, 7168, 256)


@pytest.mark.parametrize("model", ["kimi-k2-instruct-0905", "kimi-k2-thinking"])
def test_the_tuner_tries_only_launches_that_the_kernels_take(model: str) -> None:
    from kimi_k2.bench.kernels import tune

    cases = tune.cases(KimiK2Config.load(model))
    parts = {name: (case.experts, case.inter, case.top_k) for name, case in cases.items()}
    assert parts["TP8"] == (384, 256, 8)
    assert parts["EP8"] == (48, 2048, 1)
    assert parts["TP2-EP4"] == (96, 1024, 2)
    assert len(parts) == 10
    for case in cases.values():
        assert file_name(case.experts, case.inter, 7168, case.dtype, case.block, "NVIDIA H200").endswith(".json")
        for tokens in tune.TOKENS:
            found = tune.candidates(case, tokens)
            assert len(found) > 1 or tokens > 512
            for choice in found:
                choice.check(tokens, case.top_k, 7168, case.inter)
                if case.dtype != "fp8_e4m3":
                    check_choice(choice)


def test_a_launch_that_stands_skew_is_preferred_within_four_percent() -> None:
    from kimi_k2.bench.kernels.tune import Timed, best

    fast, even, slow = (ExpertChoice(False, rows, 1, 1, 1) for rows in (32, 64, 128))
    timed = [Timed(fast, 100.0, 1.0, 90.0), Timed(even, 103.9, 1.0, 40.0), Timed(slow, 104.1, 1.0, 10.0)]
    assert best(timed).choice == even
    assert best(timed[::2]).choice == fast


@pytest.mark.parametrize(
    ("experts", "inter", "near"), [(96, 2048, (48, 2048)), (384, 512, (384, 256)), (192, 2048, (48, 2048))]
)
def test_a_shape_without_a_file_borrows_the_nearest_ones(
    experts: int, inter: int, near: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Expert and tensor parallel over four and two ranks, from the shipped files of eight; with one warning."""
    for source in DIRECTORY.glob("*.json"):
        named = NAME.fullmatch(source.name)
        assert named is not None
        shape = tuple(int(v) for v in named.groups()[:2])
        if shape in ((384, 256), (48, 2048)) or "fp8" not in source.name:
            (tmp_path / source.name).write_text(source.read_text())
    monkeypatch.setattr(moe_tuning, "DIRECTORY", tmp_path)
    moe_tuning._table.cache_clear()
    keys = {"dtype": "fp8_e4m3", "block": "128x128", "device": "NVIDIA H200"}
    name = moe_tuning.file_name(near[0], near[1], 7168, **keys)
    table = load_choices(tmp_path / name)
    with pytest.warns(UserWarning, match=re.escape(name)) as caught:
        found = {tokens: choose(tokens, 8, experts, inter, 7168, **keys) for tokens in table}
    assert len(caught) == 1
    for tokens, choice in found.items():
        choice.check(tokens, 8, 7168, inter)
        if tokens * 8 <= moe_tuning.MAX_FUSED_PAIRS or not table[tokens].fused:
            assert choice == table[tokens]
    moe_tuning._table.cache_clear()


def test_own_files_lend_before_other_devices_and_far_shapes_lend_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moe_tuning, "DIRECTORY", tmp_path)
    keys = ("fp8_e4m3", "128x128", "NVIDIA H200")
    name = moe_tuning.file_name(384, 256, 7168, *keys)
    moe_tuning.save_choices(tmp_path / name, {1: ExpertChoice(True, 16, 1, 1, 1)})
    wanted = {
        (384, 512, 7168, *keys): name,
        (384, 2048, 7168, *keys): None,
        (384, 256, 1024, *keys): None,
        (384, 512, 7168, "int4", "1x32", "NVIDIA H200"): None,
        (384, 256, 7168, "fp8_e4m3", "128x128", "NVIDIA H100 80GB HBM3"): name,
        (384, 128, 7168, "fp8_e4m3", "128x128", "NVIDIA GH200"): (
            own := moe_tuning.file_name(384, 64, 7168, "fp8_e4m3", "128x128", "NVIDIA GH200")
        ),
    }
    moe_tuning.save_choices(tmp_path / own, {1: ExpertChoice(True, 16, 1, 1, 1)})
    for shape, expected in wanted.items():
        near = moe_tuning.nearest_file(moe_tuning.file_name(*shape))
        assert (near and near.name) == expected


def test_an_expert_parallel_rank_takes_the_entry_that_all_its_pairs_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuned with the pairs that arrive, asked with all that the tokens choose: more than one launch aligns."""
    monkeypatch.setattr(moe_tuning, "DIRECTORY", tmp_path)
    moe_tuning._table.cache_clear()
    keys = {"dtype": "fp8_e4m3", "block": "128x128", "device": "x"}
    fused, large = ExpertChoice(True, 16, 1, 1, 1), ExpertChoice(False, 128, 1, 1, 1)
    path = tmp_path / moe_tuning.file_name(48, 2048, 7168, *keys.values())
    moe_tuning.save_choices(path, {128: fused, 512: large})
    assert choose(64, 8, 48, 2048, 7168, **keys) == fused
    assert choose(100, 8, 48, 2048, 7168, **keys) == large
    moe_tuning._table.cache_clear()
