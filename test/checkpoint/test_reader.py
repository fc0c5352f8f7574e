"""The streaming reader: whole checkpoints read exactly once, damaged ones named by file and tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kimi_k2.checkpoint.index import INDEX_NAME, CheckpointIndex
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import (
    CheckpointError,
    CorruptHeaderError,
    KimiK2Error,
    MissingShardError,
    MissingTensorError,
    OrphanScaleError,
    TensorDtypeError,
    TensorShapeError,
    TruncatedShardError,
    UnexpectedTensorError,
)
from kimi_k2.model.decoder import KimiK2ForCausalLM

EXPERT = "model.layers.1.mlp.experts.3.up_proj"
SHARD = "model-2-of-3.safetensors"


@pytest.fixture
def fp8(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A private copy of the FP8 checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoints["fp8"], tmp_path / "fp8"))


def open_for_config(directory: Path) -> CheckpointReader:
    return CheckpointReader.for_config(directory, KimiK2Config.from_pretrained(directory))


@pytest.mark.parametrize("name", ["fp8", "bf16", "thinking", "k2.5"])
def test_stream_delivers_every_tensor_once_as_safetensors_has_it(checkpoints: dict[str, Path], name: str) -> None:
    directory = checkpoints[name]
    stored = {k: v for shard in directory.glob("*.safetensors") for k, v in load_file(shard).items()}
    reader = CheckpointReader.for_config(directory, KimiK2Config.from_pretrained(directory), vision=True)
    seen = []
    for tensor_name, tensor in reader.stream():
        seen.append(tensor_name)
        expected = stored[reader.stored_name(tensor_name)]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    assert sorted(map(reader.stored_name, seen)) == sorted(stored)
    assert reader.total_bytes == sum(tensor.nbytes for tensor in stored.values())


def test_stream_goes_shard_by_shard_in_file_order(checkpoints: dict[str, Path]) -> None:
    reader = open_for_config(checkpoints["fp8"])
    shards = [reader.tensors[name].shard for name in reader.names()]
    assert shards == sorted(shards)
    for shard in set(shards):
        offsets = json_header(checkpoints["fp8"] / shard)
        starts = [offsets[name]["data_offsets"][0] for name in reader.names() if reader.tensors[name].shard == shard]
        assert starts == sorted(starts)


def test_slices_read_a_part(checkpoints: dict[str, Path]) -> None:
    reader = open_for_config(checkpoints["fp8"])
    whole = reader.get("lm_head.weight")
    assert torch.equal(reader.get_slice("lm_head.weight", slice(5, 9), slice(0, 7)), whole[5:9, :7])


def test_wanted_filters(checkpoints: dict[str, Path]) -> None:
    reader = open_for_config(checkpoints["fp8"])
    names = [name for name, _ in reader.stream(lambda name: "layernorm" in name)]
    assert len(names) == 4 * 3


def test_lone_file_without_index(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    merged = {k: v for shard in checkpoints["fp8"].glob("*.safetensors") for k, v in load_file(shard).items()}
    save_file(merged, tmp_path / "model.safetensors")
    shutil.copy(checkpoints["fp8"] / "config.json", tmp_path)
    ids = torch.arange(9)[None]
    whole = KimiK2ForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(whole(ids), KimiK2ForCausalLM.from_pretrained(checkpoints["fp8"])(ids))


def test_leftovers_and_vision_tensors_are_ignored(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoints["k2.5"], tmp_path / "k"))
    rewrite(directory, "model-2-of-4.safetensors", lambda tensors: tensors.update({
        "vision_tower.of_another_kind.weight": torch.zeros(2),
        "language_model.model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(56, dtype=torch.bfloat16),
    }))  # fmt: skip
    assert not any("vision" in name or "inv_freq" in name for name in open_for_config(directory).tensors)
    KimiK2ForCausalLM.from_pretrained(directory)


def test_natural_shard_order(tmp_path: Path) -> None:
    names = [f"model-{i}-of-11.safetensors" for i in ("²", *range(1, 12))]
    for name in names:
        (tmp_path / name).touch()
    weight_map = {f"t{i}": name for i, name in enumerate(reversed(names))}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    assert list(CheckpointIndex.open(tmp_path).shards) == names


# -- damage ------------------------------------------------------------------------------------------------------


def json_header(path: Path) -> dict[str, dict[str, list[int]]]:
    data = path.read_bytes()
    result: dict[str, dict[str, list[int]]] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return result


def edit_index(directory: Path, change: Callable[[dict[str, str]], object]) -> None:
    raw = json.loads((directory / INDEX_NAME).read_text())
    change(raw["weight_map"])
    (directory / INDEX_NAME).write_text(json.dumps(raw))


def rewrite(directory: Path, shard: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change a shard's tensors with safetensors itself, and the index with them."""
    with safe_open(directory / shard, framework="pt") as file:
        tensors = {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    before = set(tensors)
    change(tensors)
    save_file(tensors, directory / shard)

    def update(weight_map: dict[str, str]) -> None:
        for name in before - set(tensors):
            del weight_map[name]
        weight_map.update(dict.fromkeys(set(tensors) - before, shard))

    edit_index(directory, update)


def expect(directory: Path, error: type[CheckpointError], says: str, *, file: str | None, tensor: str | None) -> None:
    with pytest.raises(error) as caught:
        KimiK2ForCausalLM.from_pretrained(directory)
    assert type(caught.value) is error
    assert says in str(caught.value)
    if file is not None:
        assert caught.value.file == str(directory / file)
    assert caught.value.tensor == tensor


def test_missing_shard(fp8: Path) -> None:
    (fp8 / SHARD).unlink()
    expect(fp8, MissingShardError, "not there", file=SHARD, tensor="model.layers.1.input_layernorm.weight")


def test_empty_directory(fp8: Path) -> None:
    (fp8 / INDEX_NAME).unlink()
    with pytest.raises(MissingShardError, match=r"expected model\.safetensors\.index\.json or"):
        KimiK2ForCausalLM.from_pretrained(fp8)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"weight_map": []}', '{"weight_map": {}}', '{"metadata": {}}'])
def test_index_garbage(fp8: Path, content: str) -> None:
    (fp8 / INDEX_NAME).write_text(content)
    with pytest.raises(CorruptHeaderError) as caught:
        KimiK2ForCausalLM.from_pretrained(fp8)
    assert caught.value.file == str(fp8 / INDEX_NAME)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "weights.bin", 3])
def test_index_names_a_file_elsewhere(fp8: Path, shard: object) -> None:
    edit_index(fp8, lambda weight_map: weight_map.update({"lm_head.weight": shard}))  # type: ignore[dict-item]
    expect(fp8, CorruptHeaderError, "beside the index", file=INDEX_NAME, tensor="lm_head.weight")


def test_tensor_missing_from_the_index(fp8: Path) -> None:
    edit_index(fp8, lambda weight_map: weight_map.pop(f"{EXPERT}.weight"))
    expect(fp8, MissingTensorError, "index does not name", file=SHARD, tensor=f"{EXPERT}.weight")


def test_index_names_a_tensor_that_the_shard_lacks(fp8: Path) -> None:
    edit_index(fp8, lambda weight_map: weight_map.update({"model.ghost.weight": SHARD}))
    expect(fp8, MissingTensorError, "does not hold it", file=SHARD, tensor="model.ghost.weight")


def test_index_names_the_wrong_shard(fp8: Path) -> None:
    edit_index(fp8, lambda weight_map: weight_map.update({"lm_head.weight": SHARD}))
    expect(fp8, MissingTensorError, "does not hold it", file=SHARD, tensor="lm_head.weight")


def test_missing_tensor(fp8: Path) -> None:
    name = "model.layers.1.input_layernorm.weight"
    rewrite(fp8, SHARD, lambda tensors: tensors.pop(name))
    expect(fp8, MissingTensorError, "expected bfloat16 [256]", file=None, tensor=name)


def test_unexpected_tensor(fp8: Path) -> None:
    rewrite(fp8, SHARD, lambda tensors: tensors.update({"model.layers.1.extra.weight": torch.zeros(3)}))
    expect(fp8, UnexpectedTensorError, "implies no such tensor", file=SHARD, tensor="model.layers.1.extra.weight")


def test_tensor_in_two_shards(fp8: Path) -> None:
    name = "model.embed_tokens.weight"
    rewrite(fp8, SHARD, lambda tensors: tensors.update({name: torch.zeros(768, 256, dtype=torch.bfloat16)}))
    expect(fp8, UnexpectedTensorError, "already in model-1-of-3", file=SHARD, tensor=name)


def test_scale_without_its_weight(fp8: Path) -> None:
    rewrite(fp8, SHARD, lambda tensors: tensors.pop(f"{EXPERT}.weight"))
    expect(fp8, OrphanScaleError, "stands alone", file=SHARD, tensor=f"{EXPERT}.weight_scale_inv")


def test_weight_without_its_scale(fp8: Path) -> None:
    rewrite(fp8, SHARD, lambda tensors: tensors.pop(f"{EXPERT}.weight_scale_inv"))
    expect(fp8, OrphanScaleError, "expected float32 [1, 2]", file=None, tensor=f"{EXPERT}.weight_scale_inv")


@pytest.mark.parametrize("lost", ["weight_packed", "weight_scale", "weight_shape"])
def test_int4_part_missing(checkpoints: dict[str, Path], tmp_path: Path, lost: str) -> None:
    directory = Path(shutil.copytree(checkpoints["thinking"], tmp_path / "int4"))
    rewrite(directory, SHARD, lambda tensors: tensors.pop(f"{EXPERT}.{lost}"))
    with pytest.raises(OrphanScaleError, match=rf"{EXPERT}\.{lost}"):
        KimiK2ForCausalLM.from_pretrained(directory)


def test_int4_weight_shape_that_lies(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoints["thinking"], tmp_path / "int4"))
    name = f"{EXPERT}.weight_shape"
    rewrite(directory, SHARD, lambda tensors: tensors[name].fill_(7))
    expect(directory, TensorShapeError, "says [7, 7], but weight_packed is [128, 32]", file=SHARD, tensor=name)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{EXPERT}.weight", [127, 256]),
        (f"{EXPERT}.weight_scale_inv", [2, 2]),
        ("model.layers.1.self_attn.kv_b_proj.weight", [255, 64]),
        ("model.layers.1.mlp.gate.e_score_correction_bias", [15]),
    ],
)
def test_wrong_shape(fp8: Path, name: str, shape: list[int]) -> None:
    rewrite(fp8, SHARD, lambda tensors: tensors.update({name: torch.zeros(shape).to(tensors[name].dtype)}))
    expect(fp8, TensorShapeError, f"got {shape}", file=SHARD, tensor=name)


def test_kv_lora_rank_that_contradicts_the_tensors(fp8: Path) -> None:
    raw = json.loads((fp8 / "config.json").read_text())
    raw["kv_lora_rank"] = 128
    (fp8 / "config.json").write_text(json.dumps(raw))
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    expect(fp8, TensorShapeError, "expected shape [144, 256] from config.json, got [80, 256]",
           file="model-1-of-3.safetensors", tensor=name)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (f"{EXPERT}.weight", torch.bfloat16),
        (f"{EXPERT}.weight", torch.float8_e5m2),
        (f"{EXPERT}.weight_scale_inv", torch.int32),
        ("model.layers.1.mlp.gate.weight", torch.int8),
    ],
)
def test_wrong_dtype(fp8: Path, name: str, dtype: torch.dtype) -> None:
    rewrite(fp8, SHARD, lambda tensors: tensors.update({name: tensors[name].float().to(dtype)}))
    expect(fp8, TensorDtypeError, f"got {dtype}", file=SHARD, tensor=name)


@pytest.mark.parametrize("keep", [0, 3, 8, 100, -1, -1000])
def test_truncated_shard(fp8: Path, keep: int) -> None:
    data = (fp8 / SHARD).read_bytes()
    (fp8 / SHARD).write_bytes(data[:keep])
    with pytest.raises(TruncatedShardError) as caught:
        KimiK2ForCausalLM.from_pretrained(fp8)
    assert caught.value.file == str(fp8 / SHARD)


def test_shard_with_extra_bytes(fp8: Path) -> None:
    with (fp8 / SHARD).open("ab") as file:
        file.write(b"more")
    with pytest.raises(TruncatedShardError, match="by its header, got"):
        KimiK2ForCausalLM.from_pretrained(fp8)


@pytest.mark.parametrize(
    ("header", "data"),
    [
        *((header, b"") for header in (b"not json", b"[]", b'{"a": 1}', b'{"a":{"dtype":"F32","shape":[1]}}')),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"four"),
    ],
)
def test_bad_header(fp8: Path, header: bytes, data: bytes) -> None:
    (fp8 / SHARD).write_bytes(len(header).to_bytes(8, "little") + header + data)
    with pytest.raises(CorruptHeaderError) as caught:
        KimiK2ForCausalLM.from_pretrained(fp8)
    assert caught.value.file == str(fp8 / SHARD)


def test_no_such_tensor(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(MissingTensorError, match=r"model\.layers\.99"):
        open_for_config(checkpoints["fp8"]).get("model.layers.99.input_layernorm.weight")


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_header_byte_is_an_error_or_harmless(fp8: Path, data: st.DataObject) -> None:
    """A flipped byte in the header never gives anything but one of our errors or the very same model."""
    path = fp8 / SHARD
    good = path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    position = data.draw(st.integers(0, min(7 + length, 4000)))
    value = data.draw(st.integers(0, 255).filter(lambda byte: byte != good[position]))
    try:
        path.write_bytes(good[:position] + bytes([value]) + good[position + 1 :])
        open_for_config(fp8)
    except KimiK2Error as error:
        assert str(error)
    finally:
        path.write_bytes(good)
