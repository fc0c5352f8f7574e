"""Names, contents and selection of tuned launch choices."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kimi_k2.bench.kernels import linear
from kimi_k2.bench.kernels.tune import best_expert_choice, for_each_count
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention import mla_plan
from kimi_k2.kernels.attention import tuning as attention_tuning
from kimi_k2.kernels.attention.mla_sizes import HEADS
from kimi_k2.kernels.common import tuning
from kimi_k2.kernels.experts import tuning as moe_tuning
from kimi_k2.kernels.experts.tuning import FILES, ExpertChoice, choose, default_choice
from kimi_k2.kernels.experts.w4a16 import check_choice
from kimi_k2.kernels.linear import block_gemm, wide_gemm
from kimi_k2.kernels.linear import tuning as linear_tuning

TILES = {"block": [(1, tile) for tile in block_gemm.TILES], "wide": wide_gemm.TILES, "cublas": [(0, 0)]}
SHAPES = [(384, 256, 8), (48, 2048, 1), (384, 128, 8), (8, 512, 2)]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuning.Files[ExpertChoice]]:
    """An empty folder in place of the package's."""
    made = replace(FILES, directory=tmp_path)
    monkeypatch.setattr(moe_tuning, "FILES", made)
    choose.cache_clear()
    yield made
    choose.cache_clear()


SHIPPED = [
    (one, path)
    for one in (FILES, linear_tuning.FILES, attention_tuning.FILES)
    for path in sorted(one.directory.glob("*"))
]


@pytest.mark.parametrize(("files", "path"), SHIPPED, ids=lambda one: getattr(one, "name", ""))
def test_shipped_files_keep_the_contract(files: tuning.Files[Any], path: Path) -> None:
    named = files.parsed(path.name)
    assert named is not None
    choices = files.load(path)
    assert choices, "an empty file would silence the warning about defaults"
    for (*_, last), choice in choices.items():
        if isinstance(choice, ExpertChoice):
            experts, inter, hidden = map(int, named[:3])
            choice.check(last, 8 * experts // 384, hidden, inter)  # pairs that arrive for a token
        elif isinstance(choice, linear_tuning.LinearChoice):
            terms, _, columns = map(int, named[:3])
            assert (choice.groups, choice.tile) in TILES[choice.kernel] and choice.cluster <= min(8, columns // 128)
            if choice.kernel == "wide":
                assert wide_gemm.Tile(choice.groups, choice.tile).shared(choice.cluster, columns)
            assert choice.kernel != "cublas" or terms == 2
        else:
            assert 0 <= choice.splits <= 64 and int(named[0]) in HEADS


@pytest.mark.parametrize(("experts", "inter", "top_k"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 64, 65, 512, 513, 4096, 16384])
def test_defaults_are_always_launchable(experts: int, inter: int, top_k: int, tokens: int) -> None:
    for hidden in (256, 7168):
        default_choice(tokens, top_k, experts, inter, hidden).check(tokens, top_k, hidden, inter)


def test_nearest_count_above_serves_and_defaults_warn_once(files: tuning.Files[ExpertChoice]) -> None:
    name = files.name(8, 256, 512, "fp8_e4m3", "128x128", device="NVIDIA H200")
    assert name == "experts=8,inter=256,hidden=512,dtype=fp8_e4m3,block=128x128,device=NVIDIA_H200.json"
    small, large = ExpertChoice(True, 16, 2, 1, 1), ExpertChoice(False, 64, 1, 1, 2)
    files.save(files.directory / name, {(2,): small, (4,): small, (128,): large, (256,): large})
    assert files.load(files.directory / name) == {(4,): small, (256,): large}
    again = {tokens: choice for (tokens,), choice in for_each_count(files.load(files.directory / name)).items()}
    assert again == dict.fromkeys((1, 2, 4), small) | dict.fromkeys((8, 16, 32, 64, 128, 256), large)
    keys = {"dtype": "fp8_e4m3", "block": "128x128", "device": "NVIDIA H200"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose(1, 2, 8, 256, 512, **keys) == small
        assert choose(5, 2, 8, 256, 512, **keys) == large
        assert choose(9999, 2, 8, 256, 512, **keys) == large
    keys["device"] = "another"
    with pytest.warns(UserWarning, match="kimi-k2 bench tune"):
        choose(1, 2, 8, 256, 512, **keys)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choose(1, 2, 8, 256, 512, **keys)


def test_broken_files_are_refused(tmp_path: Path) -> None:
    good = "experts=8,inter=256,hidden=512,dtype=fp8_e4m3,block=128x128,device=x.json"
    (tmp_path / good).write_text(json.dumps({"1": {"fused": True}}))
    with pytest.raises(KernelError, match="entry '1'"):
        FILES.load(tmp_path / good)
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(KernelError, match="file name"):
        FILES.load(tmp_path / "wrong.json")
    with pytest.raises(KernelError, match="each a word"):
        FILES.name(8, 256, 512, "fp8,e4m3", "128x128", device="x")


@pytest.mark.parametrize(("choice", "tokens", "said"), [
    (ExpertChoice(True, 32, 1, 1, 1), 64, "max_tokens"), (ExpertChoice(False, 32, 0, 1, 1), 64, "splits1"),
    (ExpertChoice(False, 32, 1, 3, 1), 64, "splits2"), (ExpertChoice(False, 32, 1, 1, 5), 64, "item_slabs"),
    (ExpertChoice(True, 16, 1, 1, 1), 65, "512"),  # more pairs than a block aligns
])  # fmt: skip
def test_check_names_the_field(choice: Any, tokens: int, said: str) -> None:
    with pytest.raises(KernelError, match=said):
        choice.check(tokens, 8, 7168, 256)


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
        assert FILES.name(case.experts, case.inter, 7168, case.dtype, case.block, device="NVIDIA H200").endswith(
            ".json"
        )
        for tokens in tune.TOKENS:
            found = tune.candidates(case, tokens)
            assert len(found) > 1 or tokens > 512
            for choice in found:
                choice.check(tokens, case.top_k, 7168, case.inter)
                if case.dtype != "fp8_e4m3":
                    check_choice(choice)


def test_a_launch_that_stands_skew_is_preferred_within_four_percent() -> None:
    fast, even, slow = (ExpertChoice(False, rows, 1, 1, 1) for rows in (32, 64, 128))
    uniform, same = {fast: 100.0, even: 103.9, slow: 104.1}, {fast: 90.0, even: 40.0, slow: 10.0}
    assert best_expert_choice(uniform, same) == even


def test_a_shape_without_a_file_borrows_a_near_one_of_its_device(files: tuning.Files[ExpertChoice]) -> None:
    """At most four times as many experts and columns together; of the same hidden size and format; with one warning."""
    keys, h200 = ("fp8_e4m3", "128x128"), "NVIDIA H200"
    choice = ExpertChoice(False, 32, 1, 1, 1)
    for experts, inter in ((384, 256), (48, 2048)):
        files.save(files.directory / files.name(experts, inter, 7168, *keys, device=h200), {(1,): choice})
    wanted = {
        (96, 2048, 7168, *keys, h200): (48, 2048), (384, 512, 7168, *keys, h200): (384, 256),
        (192, 2048, 7168, *keys, h200): (48, 2048), (384, 2048, 7168, *keys, h200): None,
        (384, 256, 1024, *keys, h200): None, (384, 512, 7168, "int4", "1x32", h200): None,
        (384, 256, 7168, *keys, "NVIDIA H100 80GB HBM3"): None,
    }  # fmt: skip
    for (*shape, device), near in wanted.items():
        found = moe_tuning.nearest_file(files.name(*shape, device=device))
        assert (found and found.name) == (near and files.name(*near, 7168, *keys, device=h200))
    with pytest.warns(UserWarning, match="experts=384,inter=256") as caught:
        found_choices = {
            choose(tokens, 8, 384, 512, 7168, dtype=keys[0], block=keys[1], device=h200) for tokens in (1, 9)
        }
    assert found_choices == {choice} and len(caught) == 1


def test_an_expert_parallel_rank_takes_the_entry_that_all_its_pairs_fit(files: tuning.Files[ExpertChoice]) -> None:
    """Tuned with the pairs that arrive, asked with all that the tokens choose: more than one launch aligns."""
    keys = {"dtype": "fp8_e4m3", "block": "128x128", "device": "x"}
    fused, large = ExpertChoice(True, 16, 1, 1, 1), ExpertChoice(False, 128, 1, 1, 1)
    path = files.directory / files.name(48, 2048, 7168, "fp8_e4m3", "128x128", device="x")
    files.save(path, {(128,): fused, (512,): large})
    assert choose(64, 8, 48, 2048, 7168, **keys) == fused
    assert choose(100, 8, 48, 2048, 7168, **keys) == large


def test_sizes_are_found_one_after_the_other(tmp_path: Path) -> None:
    """At or above in both; the smaller capacity first. Beyond the file's sizes attention has its default."""
    files = replace(attention_tuning.FILES, directory=tmp_path)
    table: dict[tuning.Sizes, attention_tuning.AttentionChoice] = {
        (capacity, batch): attention_tuning.AttentionChoice(capacity // 64 + batch, False)
        for capacity in (64, 512) for batch in (1, 8)
    }  # fmt: skip
    path = tmp_path / files.name(8, "bf16", device="NVIDIA H200")
    files.save(path, table)
    assert files.load(path) == table
    sizes = {(1, 1): (64, 1), (64, 2): (64, 8), (65, 2): (512, 8), (512, 8): (512, 8)}
    assert {asked: files.nearest(table, *asked) for asked in sizes} == {one: table[at] for one, at in sizes.items()}
    assert files.nearest({}, 1, 1) is None


@pytest.mark.parametrize("heads", HEADS)
def test_attention_beyond_its_file_is_planned_where_it_pays(heads: int) -> None:
    for batch in (1, 2, 64, 1024):
        for capacity in (64, 4096, 2**17):
            choice = attention_tuning.choose(batch, heads, capacity, True, "a card without files", 132)
            assert (choice.splits == 0) == mla_plan.pays(batch, capacity, heads)
            assert choice.splits or choice == attention_tuning.AttentionChoice(0, False)


@pytest.mark.filterwarnings("ignore:no tuned choices")
@pytest.mark.parametrize(("rows", "columns"), linear.SHAPES.values())
@pytest.mark.parametrize("terms", [1, 2])
def test_linears_without_a_file_have_launches(rows: int, columns: int, terms: int) -> None:
    for tokens in (1, 16, 17, 64, 65, 256, 257, 8192):
        choice = linear_tuning.choose(terms, tokens, rows, columns, "a card without files")
        assert (choice.groups, choice.tile) in TILES[choice.kernel]
        assert (choice.kernel == "cublas") == (terms == 2 and tokens > 256)
