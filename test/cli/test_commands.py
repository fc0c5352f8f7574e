"""The kimi-k2 command: what it prints, what it writes, and one-line errors with exit status 1."""

from __future__ import annotations

import json
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner, Result

from kimi_k2.cli import app, main
from kimi_k2.cli.app import find_commands
from kimi_k2.cli.command import Command
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.defaults import GenerationDefaults
from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.tokenization.style import ChatStyle
from kimi_k2.tokenization.tokenizer import KimiTokenizer

runner = CliRunner()


def kimi(*arguments: str, stdin: str | None = None) -> Result:
    """The command, in this process, its output in a pipe."""
    return runner.invoke(app, list(arguments), input=stdin)


@pytest.mark.parametrize("command", find_commands(), ids=lambda command: command.name)
def test_every_command_has_help_with_examples_that_it_takes(command: Command) -> None:
    result = runner.invoke(app, [command.name, "-h"], env={"COLUMNS": "300"})
    assert result.exit_code == 0
    assert command.name in runner.invoke(app, ["--help"]).output
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


def test_inspect_knows_the_output_of_convert(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    ranks = str(tmp_path / "ranks")
    assert kimi("convert", str(checkpoints["fp8"]), ranks, "--tp", "2").exit_code == 0
    shown = kimi("inspect", ranks)
    assert shown.exit_code == 0
    assert "output of `convert`, 2 files" in shown.stdout
    assert json.loads(kimi("inspect", ranks, "--json").stdout)["made_from"]["options"]["moe_tp"] == 2
    assert kimi("inspect", ranks, "--tensors").exit_code == 2


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("config.json", b'{"model_type": "kimi_k3"}', "this is Kimi-K3"),
        ("config.json", b'{"model_type": "kimi_linear"}', "this is Kimi-Linear"),
        ("Kimi-K2.6-Q4_K_M.gguf", b"GGUF", "GGUF"),
    ],
)
def test_inspect_names_what_is_another_model(tmp_path: Path, file: str, content: bytes, says: str) -> None:
    (tmp_path / file).write_bytes(content)
    shown = kimi("inspect", str(tmp_path))
    assert shown.exit_code == 1
    assert says in str(shown.exception)


def test_several_replies_with_logprobs(checkpoints: dict[str, Path]) -> None:
    """`--n` draws each reply by the next seed; log-probabilities are OpenAI's shape, of the tokens that were chosen."""
    line = (
        "generate",
        str(checkpoints["fp8"]),
        "--raw",
        "-p",
        "abc",
        "--max-tokens",
        "3",
        "--json",
        "--temperature",
        "1",
    )
    both = [json.loads(one) for one in kimi(*line, "--n", "2", "--logprobs", "2", "--seed", "5").stdout.splitlines()]
    assert [one["index"] for one in both] == [0, 1]
    (second,) = [json.loads(one) for one in kimi(*line, "--seed", "6").stdout.splitlines()]
    assert both[1]["message"] == second["message"]
    content = both[0]["logprobs"]["content"]
    assert len(content) == both[0]["usage"]["completion_tokens"]
    for one in content:
        first, other = one["top_logprobs"]
        assert 0 > first["logprob"] >= max(other["logprob"], one["logprob"])
    assert kimi("generate", str(checkpoints["fp8"]), "-p", "x", "--n", "2").exit_code == 2


def test_plan_says_what_does_not_fit_by_its_status() -> None:
    assert kimi("plan", "kimi-k2-thinking", "--preset", "h200-tp8").exit_code == 0
    refused = kimi("plan", "kimi-k2-instruct-0905", "--preset", "h200-tp1")
    assert refused.exit_code == 3
    assert "does not fit" in refused.stdout
    assert "it would fit with" in refused.stdout
    assert refused.stdout.count("TPOT") == 1


def test_generate_streams_what_the_library_generates(checkpoints: dict[str, Path]) -> None:
    directory = checkpoints["k2.5"]
    result = kimi("generate", str(directory), "--prompt", "Hello", "--max-new-tokens", "6")
    assert result.exit_code == 0, result.stderr
    config = KimiK2Config.from_pretrained(directory)
    tokenizer = KimiTokenizer.from_pretrained(directory)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Hello"}], style=ChatStyle.K25)
    eos = GenerationDefaults.from_pretrained(directory, config).sampling["eos_token_ids"]
    out = generate(
        KimiK2ForCausalLM.from_pretrained(directory), [prompt], SamplingParams(max_new_tokens=6, eos_token_ids=eos)
    )
    tokens = [token for token in out[0] if token not in eos]
    assert result.stdout.rstrip("\n") == tokenizer.decode(tokens).rstrip("\n")
    assert "TTFT" in result.stderr
    assert "TPOT" in result.stderr


def test_generate_reads_standard_input_and_batches(checkpoints: dict[str, Path]) -> None:
    directory = str(checkpoints["fp8"])
    piped = kimi("generate", directory, "--raw", "--max-new-tokens", "3", stdin="abc")
    prompted = kimi("generate", directory, "--raw", "--max-new-tokens", "3", "-p", "abc")
    assert piped.exit_code == prompted.exit_code == 0
    assert piped.stdout == prompted.stdout
    both = kimi("generate", directory, "--raw", "--max-new-tokens", "3", "-p", "abc", "-p", "longer one")
    assert both.stdout.startswith(f"--- 0\n{prompted.stdout.rstrip()}")
    assert "--- 1\n" in both.stdout


def test_make_checkpoint_and_inspect(tmp_path: Path) -> None:
    out = tmp_path / "c"
    made = runner.invoke(
        app, ["make-checkpoint", str(out), "--model", "kimi-k2.5", "--set", "num_hidden_layers=2", "--shards", "4"]
    )
    assert made.exit_code == 0, made.output
    names = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    towers = ("vision_tower.", "mm_projector.")
    assert all(name.startswith(("language_model.", *towers)) for name in names)
    assert any(name.startswith(towers[0]) for name in names)
    assert any(name.startswith(towers[1]) for name in names)
    shown = kimi("inspect", str(out), "--tensors")
    assert shown.exit_code == 0
    assert f"{len(names):,}" in shown.stdout
    assert "model.layers.1.mlp.experts.3.up_proj.weight_packed" in shown.stdout
    assert "compressed-tensors" in shown.stdout


def test_make_checkpoint_in_another_format(tmp_path: Path) -> None:
    assert runner.invoke(app, ["make-checkpoint", str(tmp_path / "b"), "--format", "bf16"]).exit_code == 0
    assert KimiK2Config.from_pretrained(tmp_path / "b").quantization is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["inspect", "{tmp}"], "config.json: no such file"),
        (["generate", "{tmp}", "-p", "x"], "config.json: no such file"),
        (["generate", "{fp8}", "-p", "x", "--top-p", "0"], "top_p: expected in (0, 1]"),
        (["generate", "{fp8}", "-p", "", "--raw"], "at least one token"),
        (["generate", "{fp8}", "-p", "x", "--max-new-tokens", "9000"], "exceed max_position_embeddings"),
        (["make-checkpoint", "{fp8}"], "holds a checkpoint already"),
        (["make-checkpoint", "{tmp}/x", "--set", "kv_lora_rank=0"], "field 'kv_lora_rank'"),
        (["make-checkpoint", "{tmp}/x", "--set", "vocab_size=300"], "a vocabulary needs the 256 single bytes"),
        (["make-checkpoint", "{tmp}/x", "--shards", "100000"], "field 'shards'"),
    ],
)
def test_errors_are_one_line(
    checkpoints: dict[str, Path],
    tmp_path: Path,
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments=[text.format(tmp=tmp_path, fp8=checkpoints["fp8"]) for text in arguments])
    assert exit_.value.code == 1
    shown = capsys.readouterr().err
    assert says in shown
    assert shown.strip().splitlines()[-1].startswith("error: ")
    assert "Traceback" not in shown


@pytest.mark.parametrize("arguments", [["--set", "nope=3"], ["--set", "vocab_size=big"], ["--model", "gpt-5"]])
def test_usage_errors(tmp_path: Path, arguments: list[str]) -> None:
    assert runner.invoke(app, ["make-checkpoint", str(tmp_path / "x"), *arguments]).exit_code == 2


def test_scripts_are_the_same_commands(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(Path(__file__).parents[2] / "scripts" / "convert_checkpoint.py")
    for tp, expected in (("2", 0), ("3", 1)):  # the directory is taken by another layout
        monkeypatch.setattr("sys.argv", [script, str(checkpoints["fp8"]), str(tmp_path / "s"), "--tp", tp])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
        assert ended.value.code == expected
