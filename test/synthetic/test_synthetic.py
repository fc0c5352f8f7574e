"""Synthetic checkpoints: the real layout, deterministic, streamed, resumable."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kimi_k2.checkpoint.names import expected_tensors
from kimi_k2.checkpoint.writer import FileLayout, SafetensorsFile
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import (
    CheckpointError,
    ConfigError,
)
from kimi_k2.media.config import MediaConfig
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.synthetic.checkpoint import SyntheticWeights, write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_real_model_has_the_published_tensors() -> None:
    """139,644 tensors and 1029.2 GB in 61 files for K2-Instruct (of which 61 are leftover inv_freq)."""
    config = KimiK2Config.from_preset("kimi-k2-instruct")
    specs = list(expected_tensors(config))
    assert len(specs) == 139_644 - 61
    assert sum(spec.nbytes for spec in specs) == pytest.approx(1029.2e9, abs=0.05e9)
    shapes = {spec.name: (spec.dtype, spec.shape) for spec in specs}
    root = "model.layers.1"
    for name, dtype, shape in (
        ("self_attn.q_a_proj.weight", torch.float8_e4m3fn, (1536, 7168)),
        ("self_attn.q_a_proj.weight_scale_inv", torch.float32, (12, 56)),
        ("self_attn.kv_a_proj_with_mqa.weight", torch.float8_e4m3fn, (576, 7168)),
        ("self_attn.kv_a_proj_with_mqa.weight_scale_inv", torch.float32, (5, 56)),
        ("self_attn.kv_b_proj.weight", torch.float8_e4m3fn, (16384, 512)),
        ("self_attn.o_proj.weight_scale_inv", torch.float32, (56, 64)),
        ("mlp.experts.383.down_proj.weight", torch.float8_e4m3fn, (7168, 2048)),
        ("mlp.experts.0.gate_proj.weight_scale_inv", torch.float32, (16, 56)),
        ("mlp.gate.weight", torch.bfloat16, (384, 7168)),
        ("mlp.gate.e_score_correction_bias", torch.float32, (384,)),
    ):
        assert shapes[f"{root}.{name}"] == (dtype, shape)


def test_k25_as_transformers_and_engines_read_it(k25_int4: Path) -> None:
    """The tower's sizes under transformers' names, which engines read, and the processor's file."""
    from transformers import Kimi_K25Config

    config = KimiK2Config.from_pretrained(k25_int4)
    theirs = Kimi_K25Config.from_pretrained(k25_int4)
    assert config.vision is not None
    for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size", "pos_emb_height"):
        assert getattr(theirs.vision_config, name) == getattr(config.vision, name)
    assert theirs.projection_hidden_size == config.vision.hidden_size
    assert theirs.image_token_id == config.vision.image_token_id
    processor = json.loads((k25_int4 / "preprocessor_config.json").read_text())["media_proc_cfg"]
    assert processor["in_patch_limit"] == 16384
    assert MediaConfig.from_pretrained(k25_int4) == MediaConfig()


def test_real_k25_has_the_published_language_model() -> None:
    config = KimiK2Config.from_preset("kimi-k2.5")
    specs = {spec.name: (spec.dtype, spec.shape) for spec in expected_tensors(config)}
    expert = "model.layers.60.mlp.experts.5"
    assert specs[f"{expert}.gate_proj.weight_packed"] == (torch.int32, (2048, 896))
    assert specs[f"{expert}.down_proj.weight_scale"] == (torch.bfloat16, (7168, 64))
    assert specs[f"{expert}.down_proj.weight_shape"] == (torch.int32, (2,))
    assert specs["model.layers.60.self_attn.o_proj.weight"] == (torch.bfloat16, (7168, 8192))
    # Of 208,550 published tensors the vision tower and projector are the rest: 27 blocks of 12, and a few more.
    assert 208_550 - 27 * 12 - 20 <= len(specs) <= 208_550 - 27 * 12


def test_layout_is_hugging_faces(fp8: Path, k25_int4: Path) -> None:
    index = json.loads((fp8 / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {f"model-{i}-of-3.safetensors" for i in (1, 2, 3)}
    total = sum(t.nbytes for shard in fp8.glob("*.safetensors") for t in load_file(shard).values())
    assert index["metadata"]["total_size"] == total
    assert all(re.match(r"model\.layers\.1\.", name) for name in load_file(fp8 / "model-2-of-3.safetensors"))
    wrapped = json.loads((k25_int4 / "model.safetensors.index.json").read_text())
    towers = {name for name in wrapped["weight_map"] if name.startswith(("vision_tower.", "mm_projector."))}
    assert all(name.startswith("language_model.") for name in wrapped["weight_map"].keys() - towers)
    assert {wrapped["weight_map"][name] for name in towers} == {"model-4-of-4.safetensors"}


def test_same_seed_same_bytes_other_seed_other_bytes(fp8: Path, tmp_path: Path) -> None:
    write_synthetic_checkpoint(tmp_path / "again", tiny_config(), seed=0)
    write_synthetic_checkpoint(tmp_path / "other", tiny_config(), seed=1)
    expected = contents(fp8)
    assert contents(tmp_path / "again") == expected
    assert contents(tmp_path / "other")["model-2-of-3.safetensors"] != expected["model-2-of-3.safetensors"]


def test_interrupted_run_resumes(tmp_path: Path) -> None:
    class StopError(Exception):
        pass

    def stop_in_the_last_shard(spec: TensorSpec) -> None:
        if spec.name.startswith("model.layers.2.mlp"):
            raise StopError

    with pytest.raises(StopError):
        write_synthetic_checkpoint(tmp_path / "a", tiny_config(), on_tensor=stop_in_the_last_shard)
    assert not (tmp_path / "a" / "model-3-of-3.safetensors").exists()
    assert not list((tmp_path / "a").glob("*.safetensors.partial"))
    finished = (tmp_path / "a" / "model-1-of-3.safetensors").stat().st_mtime_ns
    with pytest.raises(ConfigError, match="unfinished checkpoint with other arguments"):
        write_synthetic_checkpoint(tmp_path / "a", tiny_config(), seed=5)
    write_synthetic_checkpoint(tmp_path / "a", tiny_config())
    assert (tmp_path / "a" / "model-1-of-3.safetensors").stat().st_mtime_ns == finished
    write_synthetic_checkpoint(tmp_path / "b", tiny_config())
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_refuses_to_overwrite(fp8: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(fp8, tmp_path / "x"))
    with pytest.raises(ConfigError, match="holds a checkpoint already"):
        write_synthetic_checkpoint(directory, tiny_config())


def test_exponent_15_codes_and_router_bias_occur() -> None:
    weights = SyntheticWeights(tiny_config(), seed=0)
    state = {spec.name: weights.tensor(spec) for spec in expected_tensors(tiny_config())}
    codes = state["model.layers.1.mlp.experts.0.gate_proj.weight"].view(torch.uint8) & 0x7F
    assert (codes >= 0x78).any()
    assert not (codes == 0x7F).any()  # NaN
    bias = state["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    assert 0.05 < bias.std() < 0.2


def test_stored_weights_have_the_promised_variance() -> None:
    from kimi_k2.quantization.stored import format_of

    for fmt in ("fp8", "int4", "bf16"):
        config = with_format(tiny_config(hidden_size=1024, moe_intermediate_size=1024), fmt)
        weights = SyntheticWeights(config)
        module = "model.layers.1.mlp.experts.0.gate_proj"
        stored = {
            spec.name.rpartition(".")[2]: weights.tensor(spec)
            for spec in expected_tensors(config)
            if spec.name.startswith(module)
        }
        std = format_of(config.quantization, module).dequantize(stored, torch.float64).std()
        # FP8 has 64 block scales, whose spread alone lets the figure vary by 4 percent.
        assert std == pytest.approx(1024**-0.5, rel=0.12), fmt


def test_unknown_format() -> None:
    with pytest.raises(ConfigError, match=r"expected one of fp8, .*int4, .*bf16"):
        with_format(tiny_config(), "gguf")


def test_writer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    path, layout = tmp_path / "x.safetensors", FileLayout.of([TensorSpec("a", torch.float32, (2, 3))])
    for sizes, error in (((16, 16), "do not fit"), ((16,), r"not \(fully\) written")):
        with pytest.raises(CheckpointError, match=error) as caught, SafetensorsFile(path, layout) as writer:
            for size in sizes:
                writer.append("a", [memoryview(bytes(size))])
        assert caught.value.tensor == "a"
    assert not list(tmp_path.iterdir())
