"""`kimi-k2 serve`: the flags that each member and machine get, and what does not fit."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from command import kimi

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, DoesNotFitError
from kimi_k2.quantization.nvfp4 import Nvfp4Format
from kimi_k2.serving import command
from kimi_k2.sharding.dry_run import dry_run
from kimi_k2.sharding.layout import Layout

H100, H200 = 80 * 10**9, 141 * 10**9


@pytest.fixture(autouse=True)
def _vllm_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_program", lambda: ["vllm", "serve"])


FORCED: dict[str, Any] = {"backend": "cuda", "gpus": (2, H200), "extra": ["--port", "9000"]}
OURS = ["--trust-remote-code", "--tool-call-parser kimi_k2_stream", "--tensor-parallel-size 2", "--port 9000"]
REASONS, VISION, WHOLE = "--reasoning-parser kimi_k2_stream", "--mm-encoder-tp-mode data", "--no-enable-prefix-caching"
SEGMENTS: dict[str, Any] = {
    "ep_degree": 16, "quantization": "per_channel", "num_batched_tokens_buckets": [2048],
    "kv_segment_size_buckets": [2048], "num_seqs_buckets": [1, 8], "decode_context_length_buckets": [1024],
    "on_device_sampling_config": {"max_top_k": 256}, "enable_structured_outputs": True,
}  # fmt: skip
ON_HOST = """like: trn2-native-tp4-ep16
torch_native:
  on_device_sampling_config: null
  enable_structured_outputs: false
  kv_cache_dtype: fp8
"""


@pytest.mark.parametrize(
    ("name", "given", "there", "absent", "options"),
    [
        ("fp8", FORCED, OURS, [REASONS, VISION], None),
        ("thinking", FORCED, [*OURS, REASONS], [VISION], None),
        ("k2.5", FORCED, [*OURS, REASONS, VISION], [], None),
        ("thinking", {"backend": "cpu", "experts": "w2_bf16"}, ["KIMI_K2_EXPERTS=w2_bf16 "], [], None),
        ("thinking", {"backend": "cpu", "max_model_len": 512}, ["--max-model-len 512"], ["KIMI_K2_EXPERTS"], None),
        (
            "fp8", {"backend": "neuron", "preset": "trn2-tp64-ep1-b8", "compiled": Path("where it is")},
            ["NEURON_COMPILED_ARTIFACTS='where it is' ", "--tensor-parallel-size 64", "--max-num-seqs 8"], [],
            {"override_neuron_config": {"preset": "trn2-tp64-ep1-b8"}},
        ),
        (
            "fp8", {"backend": "neuron", "preset": "trn2-native-tp4-ep16", "compiled": Path("at")},
            ["NEURON_LIBTORCH_REMOTE_CACHE=at ", "VLLM_NEURON_DISABLE_WARMUP_COMPILE=1 ", "--tensor-parallel-size 64",
             "--max-num-batched-tokens 2048", "--enable-expert-parallel"],
            [WHOLE, "--no-async-scheduling", "--kv-cache-dtype"],  # it reads segments
            {"neuron_config": SEGMENTS},
        ),
        ("fp8", {"backend": "neuron", "preset": "trn2-native-tp32-ep2"}, [WHOLE], ["NEURON_"], None),
        ("fp8", {"backend": "neuron", "preset": ON_HOST}, ["--no-async-scheduling", "--kv-cache-dtype fp8"], [], None),
    ],
)  # fmt: skip
def test_the_flags_of(
    name: str, given: dict[str, Any], there: list[str], absent: list[str], options: Any,
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "gpu_lengths", lambda *_: (2, 1024))
    if "\n" in given.get("preset", ""):
        (tmp_path / "preset.yaml").write_text(given["preset"])
        given = {**given, "preset": str(tmp_path / "preset.yaml")}
    made = command.vllm_command(checkpoints[name], **given)
    assert made.words[:3] == ["vllm", "serve", str(checkpoints[name])]
    assert [text for text in (*there, *absent) if text in made.line] == there
    assert options is None or json.loads(made.words[made.words.index("--additional-config") + 1]) == options


def test_what_does_not_fit_or_go_together_is_refused(checkpoints: dict[str, Path]) -> None:
    config = KimiK2Config.load("kimi-k2-thinking")
    with pytest.raises(DoesNotFitError):
        command.gpu_lengths(config, 8, H200, None, "w2_bf16")
    assert command.gpu_lengths(config, 16, H200, None, "w2_bf16")[0] == 16
    for name, backend, named in (("fp8", "cpu", "quantization_config"), ("thinking", "neuron", "experts")):
        with pytest.raises(ConfigError) as refused:
            command.vllm_command(checkpoints[name], backend, experts="w2_bf16")
        assert refused.value.field == named
    for preset, says in (
        ("trn2-native-tp32-ep2", r"num_batched_tokens_buckets.*up to 600, got \[512, 2048\]"),
        ("trn2-tp64-ep1-nki-layers", "seq_len.*600 tokens do not divide into 256"),
    ):
        with pytest.raises(ConfigError, match=says):
            command.vllm_command(checkpoints["fp8"], "neuron", preset=preset, max_model_len=600)


def test_four_bits_outside_the_experts_take_bf16s_room() -> None:
    config, attention = KimiK2Config.load("kimi-k2-thinking"), "*self_attn*"
    several, experts_alone = (
        config.model_copy(update={"quantization": Nvfp4Format(ignore=ignore)})
        for ignore in ((attention,), (attention, "*shared_experts*", "*layers.0.mlp*"))
    )
    ranks, length = command.gpu_lengths(several, 8, 96 * 10**9, None)
    assert (ranks, length) == command.gpu_lengths(experts_alone, 8, 96 * 10**9, None)
    assert length < config.max_position_embeddings


def test_compile_of_that_line_is_vllms(fp8: Path, tmp_path: Path) -> None:
    """At the presets' 64 ranks a tiny model does not divide; its own preset has two."""
    preset = tmp_path / "mine.yaml"
    preset.write_text("like: trn2-native-tp32-ep2\ntp_degree: 2\nmoe_tp_degree: 1\n")
    line = "compile", fp8, "--preset", preset, "--out", tmp_path, "--dry-run"
    done = kimi(*line)
    words = shlex.split(done.stdout.splitlines()[-1])
    assert words[:3] == [
        f"NEURON_LIBTORCH_REMOTE_CACHE={tmp_path}", "VLLM_NEURON_CPU_COMPILE=1", "NEURON_PLATFORM_TARGET_OVERRIDE=trn2",
    ]  # fmt: skip
    refused = kimi(*line, "--hlo-only", status=2)
    assert "--hlo-only" in refused.output


@pytest.mark.parametrize("model", ["kimi-k2-instruct-0905", "kimi-k2-thinking"])
def test_lengths_leave_room_for_the_weights(model: str, fp8: Path) -> None:
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
    assert command.gpu_lengths(KimiK2Config.from_pretrained(fp8), 2, H200, 64) == (
        1,
        64,
    )  # by its blocks
    with pytest.raises(DoesNotFitError, match="16 such GPUs would hold them"):
        command.gpu_lengths(config, 8, H100, None)


def test_it_prints_what_it_runs(thinking: Path) -> None:
    options = ["--backend", "cpu", "--max-model-len", "512", "--dry-run", "--", "--port", "9000"]
    done = kimi("serve", thinking, *options)
    assert done.stdout.endswith("--max-model-len 512 --port 9000\n")
