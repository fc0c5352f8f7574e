"""The kimi-k2 command: what it prints, what it writes, and one-line errors with exit status 1."""

from __future__ import annotations

import json
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from command import kimi
from typer.main import get_command

from kimi_k2.cli import app
from kimi_k2.cli.app import find_commands
from kimi_k2.cli.command import Command
from kimi_k2.config import KimiK2Config


@pytest.mark.parametrize("command", find_commands(), ids=lambda command: command.name)
def test_every_command_has_help_with_examples_that_it_takes(command: Command) -> None:
    result = kimi(command.name, "-h", env={"COLUMNS": "300"})
    assert command.name in kimi("--help").output
    assert command.examples
    for example in command.examples:
        assert example in result.output
        words = shlex.split(example)
        called: Any = get_command(app)
        options = words[words.index("kimi-k2") + 1 :]
        while options and options[0] in getattr(called, "commands", ()):
            called, options = called.commands[options[0]], options[1:]
        if called.name == "bench":
            called = called.commands["sweep"]
        try:
            called.make_context(called.name, options)
        except typer.BadParameter as error:  # the examples' files are not here
            assert "does not exist" in error.message, example


def test_inspect_knows_the_output_of_convert(fp8: Path, tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    kimi("convert", fp8, ranks, "--tp", "2")
    assert "output of `convert`, 2 files" in kimi("inspect", ranks).stdout
    assert json.loads(kimi("inspect", ranks, "--json").stdout)["made_from"]["options"]["moe_tp"] == 2
    kimi("inspect", ranks, "--tensors", status=2)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", b'{"model_type": "kimi_k3"}', "this is Kimi-K3"),
        ("config.json", b'{"model_type": "kimi_linear"}', "this is Kimi-Linear"),
        ("config.json", b'{"model_type": "deepseek_v3", "vocab_size": 129280}', "this is DeepSeek-V3"),
        ("Kimi-K2.6-Q4_K_M.gguf", b"GGUF", "GGUF"),
    ],
)
def test_inspect_names_what_is_another_model(tmp_path: Path, file: str, content: bytes, says: str) -> None:
    (tmp_path / file).write_bytes(content)
    assert says in str(kimi("inspect", tmp_path, status=1).exception)


def test_several_replies_with_logprobs(fp8: Path) -> None:
    """`--n` draws each reply by the next seed; log-probabilities are OpenAI's shape, of the tokens that were chosen."""
    line = "generate", fp8, *["--raw", "-p", "abc", "--max-tokens", "3", "--json", "--temperature", "1"]
    both = [
        json.loads(shown) for shown in kimi(*line, "--n", "2", "--logprobs", "2", "--seed", "5").stdout.splitlines()
    ]
    assert [reply["index"] for reply in both] == [0, 1]
    (second,) = [json.loads(shown) for shown in kimi(*line, "--seed", "6").stdout.splitlines()]
    assert both[1]["message"] == second["message"]
    content = both[0]["logprobs"]["content"]
    assert len(content) == both[0]["usage"]["completion_tokens"]
    for token in content:
        first, other = token["top_logprobs"]
        assert 0 > first["logprob"] >= max(other["logprob"], token["logprob"])
    kimi("generate", fp8, "-p", "x", "--n", "2", status=2)


def test_plan_says_what_does_not_fit_by_its_status() -> None:
    kimi("plan", "kimi-k2-thinking", "--preset", "h200-tp8")
    refused = kimi("plan", "kimi-k2-instruct-0905", "--preset", "h200-tp1", status=3)
    assert "does not fit" in refused.stdout
    assert "it would fit with" in refused.stdout
    assert refused.stdout.count("TPOT") == 1


def test_generate_reads_standard_input_and_batches(fp8: Path) -> None:
    given = "generate", fp8, "--raw", "--max-new-tokens", "3"
    prompted = kimi(*given, "-p", "abc").stdout
    assert kimi(*given, input="abc").stdout == prompted
    both = kimi(*given, "-p", "abc", "-p", "longer one").stdout
    assert both.startswith(f"--- 0\n{prompted.rstrip()}")
    assert "--- 1\n" in both


def test_make_checkpoint_and_inspect(tmp_path: Path) -> None:
    out = tmp_path / "c"
    kimi("make-checkpoint", out, "--model", "kimi-k2.5", "--set", "num_hidden_layers=2")
    names = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    shown = kimi("inspect", out, "--tensors").stdout
    for text in (f"{len(names):,}", "model.layers.1.mlp.experts.3.up_proj.weight_packed", "compressed-tensors"):
        assert text in shown


def test_make_checkpoint_in_another_format(tmp_path: Path) -> None:
    kimi("make-checkpoint", tmp_path / "b", "--format", "bf16")
    assert KimiK2Config.from_pretrained(tmp_path / "b").quantization is None


def test_scripts_are_the_same_commands(fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = str(Path(__file__).parents[2] / "scripts" / "convert_checkpoint.py")
    for tp, expected in (("2", 0), ("3", 1)):  # the directory is taken by another layout
        monkeypatch.setattr("sys.argv", [script, str(fp8), str(tmp_path / "s"), "--tp", tp])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
        assert ended.value.code == expected
