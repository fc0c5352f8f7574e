"""`kimi-k2 serve`: the flags that each member and machine get, and what does not fit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kimi_k2.cli import app
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, DoesNotFitError
from kimi_k2.serving import command
from kimi_k2.sharding.dry_run import dry_run
from kimi_k2.sharding.layout import Layout

H100, H200 = 80 * 10**9, 141 * 10**9


@pytest.fixture(autouse=True)
def _vllm_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_program", lambda: ["vllm", "serve"])


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_members_get_their_flags(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "gpu_lengths", lambda *_: (2, 1024))
    for name, reasons in (("fp8", False), ("thinking", True), ("k2.5", True)):
        words = command.vllm_command(checkpoints[name], "cuda", gpus=(2, H200), extra=["--port", "9000"]).words
        assert words[:3] == ["vllm", "serve", str(checkpoints[name])]
        assert "--trust-remote-code" in words
        assert value(words, "--tool-call-parser") == "kimi_k2_stream"
        assert ("--reasoning-parser" in words) == reasons
        assert ("--mm-encoder-tp-mode" in words) == (name == "k2.5")
        assert value(words, "--tensor-parallel-size") == "2"
        assert words[-2:] == ["--port", "9000"]


def test_second_matrices_in_bf16_take_room(checkpoints: dict[str, Path]) -> None:
    made = command.vllm_command(checkpoints["thinking"], "cpu", experts="w2_bf16")
    assert (
        made.environment == {"KIMI_K2_EXPERTS": "w2_bf16"}
        and command.vllm_command(checkpoints["thinking"], "cpu").environment == {}
    )
    config = KimiK2Config.load("kimi-k2-thinking")
    with pytest.raises(DoesNotFitError):
        command.gpu_lengths(config, 8, H200, None, "w2_bf16")
    assert command.gpu_lengths(config, 16, H200, None, "w2_bf16")[0] == 16
    for name, backend, named in (("fp8", "cpu", "quantization_config"), ("thinking", "neuron", "experts")):
        with pytest.raises(ConfigError) as refused:
            command.vllm_command(checkpoints[name], backend, experts="w2_bf16")
        assert refused.value.field == named


def test_neuron_takes_the_presets_sizes(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    made = command.vllm_command(checkpoints["fp8"], "neuron", preset="trn2-tp64-ep1-b8", compiled=tmp_path)
    assert value(made.words, "--tensor-parallel-size") == "64"
    assert value(made.words, "--max-num-seqs") == "8"
    options = json.loads(value(made.words, "--additional-config"))
    assert options == {"override_neuron_config": {"preset": "trn2-tp64-ep1-b8"}}
    assert made.environment == {"NEURON_COMPILED_ARTIFACTS": str(tmp_path)}


def test_the_line_without_nxdi_gets_its_own_options(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    made = command.vllm_command(checkpoints["fp8"], "neuron", preset="trn2-native-tp4-ep16", compiled=tmp_path)
    assert value(made.words, "--tensor-parallel-size") == "64"
    assert value(made.words, "--max-num-batched-tokens") == "2048"
    assert "--enable-expert-parallel" in made.words
    assert "--no-enable-prefix-caching" not in made.words  # it reads segments
    options = json.loads(value(made.words, "--additional-config"))["neuron_config"]
    assert options == {
        "ep_degree": 16, "quantization": "per_channel", "num_batched_tokens_buckets": [2048],
        "kv_segment_size_buckets": [2048], "num_seqs_buckets": [1, 8], "decode_context_length_buckets": [1024],
        "on_device_sampling_config": {"max_top_k": 256}, "enable_structured_outputs": True,
    }  # fmt: skip
    assert "--no-async-scheduling" not in made.words
    assert made.environment["VLLM_NEURON_DISABLE_WARMUP_COMPILE"] == "1"
    whole = command.vllm_command(checkpoints["fp8"], "neuron", preset="trn2-native-tp32-ep2")
    assert "--no-enable-prefix-caching" in whole.words
    assert whole.environment == {}
    preset = tmp_path / "host.yaml"
    sampling = "  on_device_sampling_config: null\n  enable_structured_outputs: false\n  kv_cache_dtype: fp8\n"
    preset.write_text(f"like: trn2-native-tp4-ep16\ntorch_native:\n{sampling}")
    host = command.vllm_command(checkpoints["fp8"], "neuron", preset=str(preset))
    assert "--no-async-scheduling" in host.words  # which needs the device's sampler
    assert value(host.words, "--kv-cache-dtype") == "fp8" and "--kv-cache-dtype" not in made.words


def test_compile_of_that_line_is_vllms(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """At the presets' 64 ranks a tiny model does not divide; its own preset has two."""
    preset = tmp_path / "mine.yaml"
    preset.write_text("like: trn2-native-tp32-ep2\ntp_degree: 2\nmoe_tp_degree: 1\n")
    line = ["compile", str(checkpoints["fp8"]), "--preset", str(preset), "--out", str(tmp_path), "--dry-run"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    words = shlex.split(done.stdout.splitlines()[-1])
    assert words[:3] == [
        f"NEURON_LIBTORCH_REMOTE_CACHE={tmp_path}", "VLLM_NEURON_CPU_COMPILE=1", "NEURON_PLATFORM_TARGET_OVERRIDE=trn2",
    ]  # fmt: skip
    refused = CliRunner().invoke(app, [*line, "--hlo-only"])
    assert refused.exit_code == 2 and "--hlo-only" in refused.output


@pytest.mark.parametrize("model", ["kimi-k2-instruct-0905", "kimi-k2-thinking"])
def test_lengths_leave_room_for_the_weights(model: str, checkpoints: dict[str, Path]) -> None:
    """Weights by the converter's own count of a rank's file; a token takes 70,272 bytes on every rank."""
    config = KimiK2Config.load(model)
    weights = dry_run(config, Layout(8, 1, "cuda", "stored")).rank_bytes
    ranks, length = command.gpu_lengths(config, 8, H200, None)
    room = 0.95 * H200 - weights - 3e9  # an engine's share of a card, and its workspaces
    assert ranks == 8
    assert length % command.STEP == 0
    assert length * 70_272 <= room
    assert length == config.max_position_embeddings or (length + command.STEP + 1) * 70_272 > room
    assert command.gpu_lengths(config, 11, H200, 4096) == (8, 4096)
    assert command.gpu_lengths(KimiK2Config.from_pretrained(checkpoints["fp8"]), 2, H200, 64) == (
        1,
        64,
    )  # by its blocks
    with pytest.raises(DoesNotFitError, match="16 such GPUs would hold them"):
        command.gpu_lengths(config, 8, H100, None)


def test_it_prints_what_it_runs(checkpoints: dict[str, Path]) -> None:
    line = ["serve", str(checkpoints["thinking"]), "--backend", "cpu", "--max-model-len", "512", "--dry-run"]
    done = CliRunner().invoke(app, [*line, "--", "--port", "9000"])
    assert done.exit_code == 0, done.output
    words = shlex.split(done.stdout)
    assert value(words, "--max-model-len") == "512"
    assert value(words, "--port") == "9000"
