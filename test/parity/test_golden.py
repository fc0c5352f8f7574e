"""Golden files: deterministic, small, and refused with a reason when they are not what they should be."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import kimi

from kimi_k2 import __version__
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KimiK2Error
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parity.compare import compare
from kimi_k2.parity.golden import (
    DESCRIPTION,
    TENSORS,
    check_model,
    check_size,
    checkpoint_identity,
    load_golden,
    save_golden,
)
from kimi_k2.parity.logits import check_logits, random_tokens
from kimi_k2.parity.run import run, run_plain
from kimi_k2.parity.trace import Inputs, ParityError, Trace, captured_bytes

SMALL = Inputs(random_tokens(512, 12, 0), random_tokens(512, 3, 1), kept_positions=8)


def captured(checkpoint: Path, directory: Path) -> Path:
    config, trace = KimiK2Config.from_pretrained(checkpoint), run("cpu", checkpoint, SMALL, "float32")
    save_golden(directory, trace, config, "cpu", "float32", checkpoint)
    return directory


def said(directory: Path, **changed: object) -> None:
    file = directory / DESCRIPTION
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


@pytest.fixture(scope="module")
def golden(fp8: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captured(fp8, tmp_path_factory.mktemp("golden"))


def test_same_run_same_bytes(fp8: Path, golden: Path, tmp_path: Path) -> None:
    captured(fp8, tmp_path)
    for name in (TENSORS, DESCRIPTION):
        assert (tmp_path / name).read_bytes() == (golden / name).read_bytes()
    loaded = load_golden(golden)
    assert loaded.trace.inputs == Inputs(list(SMALL.prompt), list(SMALL.forced), None, 8)
    assert sorted(path.name for path in golden.iterdir()) == [DESCRIPTION, TENSORS]


def test_size_is_known_before_the_run(fp8: Path, golden: Path) -> None:
    config = KimiK2Config.from_pretrained(fp8)
    stored = sum(value.nbytes for value in load_golden(golden).trace.values.values())
    assert captured_bytes(config, SMALL) == stored


def test_a_full_size_capture_is_under_2_gb() -> None:
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905")
    usual = Inputs([0] * 1024, [0] * 16)
    assert check_size(config, usual) < 2e9
    with pytest.raises(ParityError, match=r"GB, the limit is 2"):
        check_size(config, Inputs([0] * 1024, [0] * 16, kept_positions=1024))
    assert check_size(config, Inputs([0] * 1024, [0] * 16, [0, 1, 30, 60], 1024)) < 2e9


def test_only_chosen_layers_are_kept(fp8: Path) -> None:
    chosen = Inputs(SMALL.prompt, SMALL.forced, [2], 4)
    trace = run("cpu", fp8, chosen, "float32")
    layers = {match[1] for key in trace.values if (match := re.search(r"layers\.(\d)", key))}
    assert layers == {"2"}
    assert len(trace.values["prefill/norm"]) == 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / DESCRIPTION).unlink(), "no such file"),
        (lambda d: (d / TENSORS).unlink(), "no such file"),
        (lambda d: (d / DESCRIPTION).write_text((d / DESCRIPTION).read_text()[:200]), "not a golden description"),
        (lambda d: (d / TENSORS).write_bytes((d / TENSORS).read_bytes()[:999]), "cannot be read"),
        (lambda d: (d / DESCRIPTION).write_text('{"schema": "other/9"}'), "schema 'other/9'"),
        (lambda d: (d / DESCRIPTION).write_text('{"schema": "kimi-k2-golden/2"}'), "field 'version': missing"),
        (lambda d: said(d, config=3), "golden.json: field 'config'"),
        (lambda d: said(d, inputs={"prompt": [1], "forced": [[]]}), "'inputs.forced.0'"),
        (lambda d: said(d, inputs={"prompt": [2**64], "forced": []}), "'inputs.prompt.0'"),
    ],
)
def test_damaged_files(golden: Path, tmp_path: Path, damage: object, message: str) -> None:
    for name in (TENSORS, DESCRIPTION):
        (tmp_path / name).write_bytes((golden / name).read_bytes())
    damage(tmp_path)  # type: ignore[operator]
    with pytest.raises(ParityError, match=message):
        load_golden(tmp_path)


def test_a_folder_that_cannot_be_written_is_told_before_the_run(
    golden: Path, fp8: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("kimi_k2.parity.run.run")
    for words in (("capture", fp8, "/proc/out"), ("compare", golden, fp8, "--backend", "cpu", "--out", "/proc/out")):
        error = kimi("parity", *words, status=1).exception
        assert isinstance(error, OSError) and "/proc/out" in str(error)


def test_tensors_of_another_run(golden: Path, tmp_path: Path, bf16: Path) -> None:
    captured(bf16, tmp_path)
    (tmp_path / DESCRIPTION).write_bytes((golden / DESCRIPTION).read_bytes())
    with pytest.raises(ParityError, match="SHA-256"):
        load_golden(tmp_path)


def test_another_model(golden: Path) -> None:
    with pytest.raises(ParityError, match="num_hidden_layers is 3 there, 61 here"):
        check_model(load_golden(golden), KimiK2Config.from_preset("kimi-k2-instruct-0905"))


def test_other_settings_are_named(golden: Path, fp8: Path) -> None:
    own = KimiK2Config.from_pretrained(fp8)
    assert check_model(load_golden(golden), own) == []
    (difference,) = check_model(load_golden(golden), own.model_copy(update={"rms_norm_eps": 1e-5}))
    assert "rms_norm_eps: 1e-06 in the golden run, 1e-05 here" in difference


def test_unequal_tokens_and_nan(golden: Path, fp8: Path) -> None:
    expected, model = load_golden(golden).trace, KimiK2ForCausalLM.from_pretrained(fp8)
    shorter = Inputs(SMALL.prompt, SMALL.forced[:2], kept_positions=8)
    with pytest.raises(ParityError, match="forced: expected 3 tokens"):
        compare(run_plain(model, shorter), expected, model.config)
    other = Inputs([1, *SMALL.prompt[1:]], SMALL.forced, kept_positions=8)
    with pytest.raises(ParityError, match="prompt: other tokens"):
        compare(run_plain(model, other), expected, model.config)
    broken, _ = changed(golden, "decode/lm_head", lambda values: values[1, 7].fill_(torch.nan))
    with pytest.raises(ParityError, match="logits of the run: NaN at step 2"):
        compare(broken, expected, model.config)


def test_infinite_logits_are_refused() -> None:
    """In both runs at the same place their difference is NaN; a maximum over it must not let the pair pass."""
    expected = torch.linspace(-1, 1, 100).repeat(2, 1)
    expected[1, 0] = -torch.inf
    with pytest.raises(ParityError, match="logits of the golden: infinity at step 1"):
        check_logits(expected.clone(), expected)


def test_identity_is_of_the_weights(golden: Path, fp8: Path, tmp_path: Path) -> None:
    """One other bit of a weight is another checkpoint; the same files elsewhere are not."""
    own = load_golden(golden)
    assert own.version == __version__
    copy = shutil.copytree(fp8, tmp_path / "copy")
    assert checkpoint_identity(copy) == own.checkpoint
    shard = next(iter(sorted(copy.glob("*.safetensors"))))
    with shard.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    assert checkpoint_identity(copy) != own.checkpoint


def test_a_nan_inside_is_a_divergence(golden: Path, fp8: Path) -> None:
    runs = changed(golden, EXPERTS, lambda values: values[3, 0].fill_(torch.nan))
    assert first_row(fp8, *runs) == (1, "mlp.experts", 3)


def changed(golden: Path, point: str, change: Callable[[torch.Tensor], object]) -> tuple[Trace, Trace]:
    """A run that differs from the golden one in one point, and the golden one."""
    expected = load_golden(golden).trace
    other = Trace(expected.inputs, {key: value.clone() for key, value in expected.values.items()})
    change(other.values[point])
    return other, expected


EXPERTS = "prefill/layers.1.mlp.experts"


def first_row(
    checkpoint: Path, actual: Trace, expected: Trace, dtype: str = "float32"
) -> tuple[int | None, str, int | None] | None:
    """Layer, module and row that diverge first."""
    first = compare(actual, expected, KimiK2Config.from_pretrained(checkpoint), dtype).first
    return None if first is None else (first.layer, first.module, first.row)


def test_a_row_of_zeros_is_measured_by_the_others(golden: Path, fp8: Path) -> None:
    """Such a row has no norm of its own; one of the usual size in its place is a divergence, however small all are."""
    other, expected = changed(golden, EXPERTS, lambda values: values.mul_(1e-6))
    expected.values[EXPERTS].mul_(1e-6)[2] = 0
    assert first_row(fp8, other, expected) == (1, "mlp.experts", 2)
    other.values[EXPERTS][2] = 0
    assert first_row(fp8, other, expected) is None


@pytest.mark.parametrize(("share", "passes"), [(0.09, True), (0.11, False)])
def test_near_ties_may_change_a_tenth_of_the_choices_in_bfloat16(
    golden: Path, fp8: Path, share: float, passes: bool
) -> None:
    def change(choices: torch.Tensor) -> None:
        changed_choices = choices.flatten()[: round(share * choices.numel())]
        changed_choices += 1000  # no expert that anybody chose
        choices.view(-1)[: len(changed_choices)] = changed_choices

    runs = changed(golden, "prefill/layers.1.mlp.gate.selection", change)
    assert (first_row(fp8, *runs, "bfloat16") is None) is passes
    assert first_row(fp8, *runs) is not None


def test_logits_rule_is_nxdis() -> None:
    """The tolerances by hand: 1 % on the top 5, 5 % on all, a diverging choice by less than 0.001."""
    expected = torch.linspace(-1, 1, 100).repeat(2, 1)
    assert check_logits(expected, expected).passed
    off = expected.clone()
    off[0, 99] *= 1.0099
    assert check_logits(off, expected).passed
    off[0, 99] = 1.0102
    assert not check_logits(off, expected).passed
    tie = expected.clone()
    tie[1, 98] = expected[1, 99] + 0.0005
    result = check_logits(tie, expected)
    assert result.divergences == [1]
    assert result.divergence_difference == pytest.approx(0.0005, rel=1e-3)


def test_commands(k25_int4: Path, bf16: Path, tmp_path: Path) -> None:
    options = ["--prompt-length", "8", "--steps", "2", "--layers", "0,2"]
    done = kimi("parity", "capture", k25_int4, tmp_path / "g", *options, "--greedy")
    done = kimi("parity", "compare", tmp_path / "g", k25_int4, "--backend", "cpu", "--out", tmp_path / "o")
    assert "PASS" in done.output
    report = json.loads((tmp_path / "o" / "parity.json").read_text())
    assert report["passed"]
    other = kimi("parity", "compare", tmp_path / "g", bf16, "--backend", "cpu", status=1)
    assert "first divergence" in other.output
    assert "other weights" in other.output
    assert "other weights" not in done.output
    assert isinstance(
        kimi("parity", "capture", k25_int4, "x", "--backend", "neuron", status=None).exception, KimiK2Error
    )
