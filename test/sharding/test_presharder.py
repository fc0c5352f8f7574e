"""Conversion of tiny checkpoints: values against the plain model's, kills, damage, manifest."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from threading import Semaphore
from types import SimpleNamespace

import pytest
import torch
from forked import python
from safetensors.torch import load_file
from typer.testing import CliRunner

from kimi_k2.checkpoint.names import EXPERT
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.cli import app
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError, MissingShardError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.quantization.fp8_block import dequantize_fp8_block, dequantized_chunks
from kimi_k2.quantization.neuron_e4m3 import halve_blocks, quantize_chunks, reserved_codes
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.sharding import rank_files
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import JOURNAL, MANIFEST, check_made_for
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import verify
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

KILLS = int(os.environ.get("KIMI_K2_DRAWS", "4"))
WORKER = """
import sys
import torch
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
torch.set_num_threads(1)
Presharder(sys.argv[1], sys.argv[2], Layout(2, 2)).run()
"""
# Goes on only when it is told to: at every expert, after every layer, before and after the manifest is written.
STEPPING = """
import os, sys
import torch
from kimi_k2.sharding import manifest, presharder
from kimi_k2.sharding.layout import Layout

def step(*_):
    os.write(1, b".")
    if not os.read(0, 1):
        os._exit(1)

def write_json(path, value, write=manifest.write_json):
    step()
    write(path, value)
    step()

torch.set_num_threads(1)
manifest.write_json = write_json
presharder.Presharder(sys.argv[1], sys.argv[2], Layout(2, 2), on_bytes=step, on_layer=step).run()
"""


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def assemble(output: Path, source_layout: Layout, plan_of: Path) -> dict[str, torch.Tensor]:
    """Whole tensors from all ranks' files, placed by the plan's regions."""
    plan = make_plan(KimiK2Config.from_pretrained(plan_of), source_layout)
    ranks = [
        load_file(output / "weights" / f"tp{rank}_sharded_checkpoint.safetensors")
        for rank in range(source_layout.ranks)
    ]
    whole = {}
    for tensor in plan.tensors:
        target = torch.empty(tensor.shape, dtype=torch.float64)
        for rank, held in enumerate(ranks):
            start = 0
            for region in tensor.regions(rank):
                if tensor.dim is None:
                    target[region] = held[tensor.name].double()
                    continue
                width = region[tensor.dim].stop - region[tensor.dim].start
                target[region] = held[tensor.name].narrow(tensor.dim, start, width).double()
                start += width
        whole[tensor.name] = target
    return whole


@pytest.mark.parametrize("source", ["fp8", "bf16", "thinking", "k2.5"])
@pytest.mark.parametrize("experts", ["bf16", "blockwise", "per_channel"])
def test_neuron_values(checkpoints: dict[str, Path], tmp_path: Path, source: str, experts: str) -> None:
    layout = Layout(2, 2, experts=experts)
    manifest = Presharder(checkpoints[source], tmp_path, layout).run()
    whole = assemble(tmp_path, layout, checkpoints[source])
    state = KimiK2ForCausalLM.from_pretrained(checkpoints[source]).state_dict()
    # bf16 rounding, block e4m3 from floats (exact from FP8), per-channel e4m3
    tolerance = {"bf16": 2e-3, "blockwise": 1e-5 if source == "fp8" else 0.03, "per_channel": 0.036}[experts]
    for name in ("gate_up_proj", "down_proj"):
        found = whole[f"layers.1.mlp.expert_mlps.mlp_op.{name}.weight"]
        if experts != "bf16":
            scale = whole[f"layers.1.mlp.expert_mlps.mlp_op.{name}.scale"]
            for dim in (1, 2):
                scale = scale.repeat_interleave(found.shape[dim] // scale.shape[dim], dim)
            found = found * scale
        expected = state[f"model.layers.1.mlp.experts.{name}"].double().mT
        assert float((found - expected).norm() / expected.norm()) < tolerance
    for name, tensor in whole.items():
        stored = state.get(f"model.{name}", state.get(name))
        if stored is not None:
            assert torch.equal(tensor, stored.to(torch.bfloat16).double()), name
    assert list(verify(tmp_path)) == list(manifest["files"])
    if experts != "bf16":
        assert 0 < manifest["errors"]["total"]["relative_l2"] < tolerance


@pytest.mark.parametrize("source", ["fp8", "thinking", "k2.5", "bf16"])
def test_cuda_keeps_the_stored_bytes(checkpoints: dict[str, Path], tmp_path: Path, source: str) -> None:
    """The plain model holding quantized weights names its buffers as this output does."""
    layout = Layout(1, 2, "cuda", "stored")
    if source == "fp8":
        config = tiny_config(hidden_size=512, intermediate_size=512, moe_intermediate_size=256, num_attention_heads=16,
                             num_key_value_heads=16, v_head_dim=32, num_hidden_layers=2)  # fmt: skip
        write_synthetic_checkpoint(tmp_path / "source", config)
        directory = tmp_path / "source"
    else:
        directory = checkpoints[source]
    Presharder(directory, tmp_path / "out", layout).run()
    whole = assemble(tmp_path / "out", layout, directory)
    model = KimiK2ForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, keep_quantized=True)
    state = model.state_dict()
    compared = 0
    for name, tensor in whole.items():
        if name in state:
            assert torch.equal(tensor, state[name].double()), name
            compared += 1
    assert compared > 20


def test_cuda_in_bf16(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    kind = "".join(("bf", "16"))  # no constant, as what a command line gives
    layout = Layout(1, target="cuda", experts=kind)
    Presharder(checkpoints["fp8"], tmp_path, layout).run()
    whole = assemble(tmp_path, layout, checkpoints["fp8"])
    state = KimiK2ForCausalLM.from_pretrained(checkpoints["fp8"], dtype=torch.bfloat16).state_dict()
    shared = [name for name in whole if name in state]
    assert "model.layers.0.self_attn.o_proj.weight" in shared
    assert not [name for name in shared if not torch.equal(whole[name], state[name].double())]
    assert not [name for name in whole if "scale" in name]


def test_kill_and_resume(tmp_path: Path) -> None:
    """SIGKILL at random moments of a run, always before its end: the worker waits for leave to go past them."""
    source = tmp_path / "source"
    config = tiny_config(num_hidden_layers=12)
    write_synthetic_checkpoint(source, config)

    def start(output: Path, leave: int) -> subprocess.Popen[bytes]:
        command = [*python(), "-c", STEPPING, str(source), str(output)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, pipesize=2**16, bufsize=0
        )
        assert process.stdin is not None
        process.stdin.write(b"g" * leave)
        return process

    whole = start(tmp_path / "whole", 10_000)
    steps = len(whole.communicate()[0])
    assert whole.returncode == 0
    assert 100 < steps < 10_000
    expected = contents(tmp_path / "whole")
    chooser = random.Random(0)
    resumed_layers = 0
    # The last one dies between the manifest and the journal's removal.
    for kill, last in enumerate([*(chooser.randrange(1, steps) for _ in range(KILLS - 1)), steps]):
        output = tmp_path / f"killed{kill}"
        process = start(output, last - 1)
        assert process.stdout is not None
        for _ in range(last):
            assert process.stdout.read(1)
        time.sleep(chooser.uniform(0.0, 0.01))  # the thread that flushes has not stopped
        process.kill()
        process.communicate()  # until the program behind it is gone, too
        assert process.returncode == -signal.SIGKILL
        journal = output / JOURNAL
        assert journal.exists()
        assert (output / MANIFEST).exists() == (last == steps)
        resumed_layers += journal.read_bytes().count(b"\n") > 1
        Presharder(source, output, Layout(2, 2)).run()
        assert contents(output) == expected
        for name in expected:
            (output / name).unlink()
    print(f"\n{KILLS} kills before the end, {resumed_layers} of them with finished layers to go on from")


def test_full_disk_keeps_finished_layers(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0
    real = os.fdatasync

    def full(fd: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 6:
            raise OSError(28, "No space left on device")
        real(fd)

    monkeypatch.setattr(os, "fdatasync", full)
    with pytest.raises(CheckpointError, match=r"No space left.*run the same command again"):
        Presharder(checkpoints["fp8"], tmp_path / "a", Layout(2)).run()
    assert len((tmp_path / "a" / JOURNAL).read_text().splitlines()) > 1
    monkeypatch.undo()
    Presharder(checkpoints["fp8"], tmp_path / "a", Layout(2)).run()
    Presharder(checkpoints["fp8"], tmp_path / "b", Layout(2)).run()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_disk_too_small_is_found_before_any_work(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The kernel's own refusal: a limit on the size of files stands for the end of the disk."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n" + WORKER
    command = [*python(), "-c", limited, str(checkpoints["fp8"]), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "CheckpointError" in done.stderr
    assert "cannot reserve" in done.stderr
    assert "run the same command again" in done.stderr
    assert not list((tmp_path / "out" / "weights").glob("*.safetensors"))
    Presharder(checkpoints["fp8"], tmp_path / "out", Layout(2, 2)).run()


def test_a_shard_that_goes_away_keeps_finished_layers(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoints["fp8"], source)
    job = Presharder(source, tmp_path / "a", Layout(2))
    shard = source / job.reader.index.shards[-2]
    # A link, as in the Hugging Face cache: renaming the file itself would change its ctime, by which a source is known.
    blob = shard.rename(tmp_path / "blob")
    shard.symlink_to(blob)
    job = Presharder(source, tmp_path / "a", Layout(2))
    shard.unlink()
    with pytest.raises(CheckpointError, match=shard.name):
        job.run()
    assert len((tmp_path / "a" / JOURNAL).read_text().splitlines()) > 1
    shard.symlink_to(blob)
    Presharder(source, tmp_path / "a", Layout(2)).run()
    Presharder(source, tmp_path / "b", Layout(2)).run()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_never_worse_than_clamping(checkpoints: dict[str, Path]) -> None:
    """Every expert's matrices, blockwise and a scale a channel, against the published port's clamping at 240."""
    config = KimiK2Config.from_pretrained(checkpoints["fp8"])
    reader = CheckpointReader.for_config(checkpoints["fp8"], config)
    compared = 0
    for name in reader.names():
        if not EXPERT.match(name) or not name.endswith(".weight"):
            continue
        weight, scale = reader.get(name), reader.get(f"{name}_scale_inv")
        plain = dequantize_fp8_block(weight, scale, dtype=torch.float64)
        clamped = weight.float().clamp(-240, 240).to(torch.float8_e4m3fn)

        def error(found: torch.Tensor, plain: torch.Tensor = plain) -> float:
            return float((found.double() - plain).norm())

        def by_channels(weight: torch.Tensor, scale: torch.Tensor = scale) -> torch.Tensor:
            codes, own = quantize_chunks(weight.shape, dequantized_chunks(weight, scale, (128, 128)))
            return codes.float() * own

        by_block = error(dequantize_fp8_block(clamped, scale))
        by_channel = error(by_channels(clamped))
        halved, doubled, _ = halve_blocks(weight, scale, (128, 128), 32)
        ours = error(dequantize_fp8_block(halved, doubled, (32, 32)))
        ours_by_channel = error(by_channels(weight))
        assert ours <= by_block
        assert ours_by_channel <= by_channel
        if reserved_codes(weight):
            assert ours < by_block
            assert ours_by_channel < by_channel
            compared += 1
    assert compared > 50


def test_other_options_are_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    Presharder(checkpoints["fp8"], tmp_path, Layout(2)).run()
    with pytest.raises(ConfigError, match=r"other options .*experts \w+, now bf16"):
        Presharder(checkpoints["fp8"], tmp_path, Layout(2, experts="bf16")).run()


def test_files_for_another_model_or_layout_are_refused_without_the_checkpoint(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    config = KimiK2Config.from_pretrained(checkpoints["fp8"])
    with pytest.raises(MissingShardError, match="not finished"):
        check_made_for(tmp_path, config, Layout(2))
    Presharder(checkpoints["fp8"], tmp_path, Layout(2)).run()
    check_made_for(tmp_path, config, Layout(2))
    for other in (Layout(1, 2), Layout(2, experts="blockwise"), Layout(2, spmd_rank=True)):
        with pytest.raises(ConfigError, match=MANIFEST):
            check_made_for(tmp_path, config, other)
    with pytest.raises(ConfigError, match="another configuration"):
        check_made_for(tmp_path, KimiK2Config.from_pretrained(checkpoints["thinking"]), Layout(2))


def test_verify_finds_a_flipped_bit(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    Presharder(checkpoints["fp8"], tmp_path, Layout(2)).run()
    path = tmp_path / "weights" / "tp1_sharded_checkpoint.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum") as caught:
        list(verify(tmp_path))
    assert caught.value.tensor in load_file(path)


def test_commands(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    from kimi_k2.cli import app

    run = CliRunner().invoke
    options = ["--tp", "2", "--ep", "2"]
    assert run(app, ["convert", str(checkpoints["fp8"]), str(tmp_path), *options]).exit_code == 0
    assert run(app, ["verify", str(tmp_path)]).exit_code == 0
    dry = run(app, ["convert", "kimi-k2-instruct-0905", "--dry-run"]).output
    assert "1,029,173,249,888" in dry
    assert "extrapolated" in dry
    preset = tmp_path / "four.yaml"
    preset.write_text("like: trn2-tp32-ep2\ntp_degree: 4\nmoe_tp_degree: 2\n")
    rows = json.loads(run(app, ["inspect", str(checkpoints["fp8"]), "--preset", str(preset), "--json"]).output)
    assert any(row["cut"] == "dim 2 / 2, stride 2, experts / 2" for row in rows)
    assert run(app, ["convert", str(checkpoints["fp8"]), str(tmp_path), "--tp", "3"]).exit_code == 1


def test_int4_source_needs_no_fp8(tmp_path: Path) -> None:
    config = with_format(tiny_config(), "int4")
    write_synthetic_checkpoint(tmp_path / "source", config)
    manifest = Presharder(tmp_path / "source", tmp_path / "out", Layout(2)).run()
    assert manifest["errors"]["total"]["relative_l2"] < 0.05


def test_a_preset_is_a_layout(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(
        "instance: trn2.48xlarge\nexperts: blockwise\ntp_degree: 2\nmoe_tp_degree: 1\nmoe_ep_degree: 2\n"
        "batch_size: 1\nseq_len: 64\nmax_context_length: 64\n"
    )
    named = ["convert", str(checkpoints["fp8"]), str(tmp_path / "named"), "--preset", str(tmp_path / "two.yaml")]
    assert CliRunner().invoke(app, named).exit_code == 0
    spelled = ["convert", str(checkpoints["fp8"]), str(tmp_path / "spelled"), "--tp", "1", "--ep", "2"]
    assert CliRunner().invoke(app, spelled).exit_code == 0
    for path in (tmp_path / "named" / "weights").iterdir():
        assert path.read_bytes() == (tmp_path / "spelled" / "weights" / path.name).read_bytes()
    both = CliRunner().invoke(app, [*named, "--tp", "4"])
    assert both.exit_code == 2
    assert "--tp" in both.output


def test_the_disk_begins_before_a_layer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_files, "_EARLY", 10)
    begun, held = Semaphore(0), Semaphore(0)

    def sync() -> None:
        begun.release()
        held.acquire()

    file = SimpleNamespace(sync=sync)
    with rank_files.Flusher([file]) as flushing:  # type: ignore[list-item]
        for count in (4, 6, 11, 11):  # one flush at the second, none more while it lasts
            flushing.wrote(count)
        assert begun.acquire(timeout=10)
        held.release(2)
        flushing.wait()
    assert not begun.acquire(blocking=False)


def test_parts_do_not_reach_beyond_a_tensor(tmp_path: Path) -> None:
    layout = rank_files.FileLayout.of([TensorSpec("a", torch.int8, (8,)), TensorSpec("b", torch.int8, (8,))])
    file = rank_files.RankFile(tmp_path / "x.safetensors", layout, resume=False)
    with pytest.raises(AssertionError):
        file.write("a", [memoryview(bytes(6))], 6)
    file.close(discard=True)
