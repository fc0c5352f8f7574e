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
from rewritten import tensors_of
from safetensors import safe_open
from safetensors.torch import save_file

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
    stored = tensors_of(directory)
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


def test_leftovers_and_vision_tensors_are_ignored(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoints["k2.5"], tmp_path / "k"))
    rewrite(directory, "model-2-of-4.safetensors", lambda tensors: tensors.update({
        "vision_tower.of_another_kind.weight": torch.zeros(2),
        "language_model.model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(56, dtype=torch.bfloat16),
    }))  # fmt: skip
    assert not any("vision" in name or "inv_freq" in name for name in open_for_config(directory).tensors)
    KimiK2ForCausalLM.from_pretrained(directory)


def test_natural_shard_order(tmp_path: Path) -> None:
    names = [f"model-{i}-of-11.safetensors" for i in (*range(1, 12), "²")]
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


@pytest.mark.parametrize(
    "shard", ["../x.safetensors", "/etc/passwd", "weights.bin", 3, f"{'x' * 5000}.safetensors", "a\0b.safetensors"]
)
def test_index_names_a_file_elsewhere(fp8: Path, shard: object) -> None:
    edit_index(fp8, lambda weight_map: weight_map.update({"lm_head.weight": shard}))  # type: ignore[dict-item]
    expect(fp8, CorruptHeaderError, "beside the index", file=INDEX_NAME, tensor="lm_head.weight")


def in_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], object]:
    return lambda directory: edit_index(directory, change)


def in_shard(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], object]:
    return lambda directory: rewrite(directory, SHARD, change)


def of_shape(name: str, *shape: int) -> Callable[[Path], object]:
    return in_shard(lambda tensors: tensors.update({name: torch.zeros(shape).to(tensors[name].dtype)}))


def of_dtype(name: str, dtype: torch.dtype) -> Callable[[Path], object]:
    return in_shard(lambda tensors: tensors.update({name: tensors[name].float().to(dtype)}))


NORM, EMBEDDING, BIAS = (
    "model.layers.1.input_layernorm.weight", "model.embed_tokens.weight",
    "model.layers.1.mlp.gate.e_score_correction_bias",
)  # fmt: skip
WEIGHT, SCALE, KV_B = f"{EXPERT}.weight", f"{EXPERT}.weight_scale_inv", "model.layers.1.self_attn.kv_b_proj.weight"
Damage = tuple[Callable[[Path], object], type[CheckpointError], str, str | None, str]
# What is done to a directory; the error, what it says, the file and the tensor that it names.
DAMAGES: list[Damage] = [
    (lambda directory: (directory / SHARD).unlink(), MissingShardError, "not there", SHARD, NORM),
    (in_index(lambda index: index.pop(WEIGHT)), MissingTensorError, "index does not name", SHARD, WEIGHT),
    (in_index(lambda index: index.update({"model.ghost.weight": SHARD})), MissingTensorError, "does not hold it", SHARD,
     "model.ghost.weight"),
    (in_index(lambda index: index.update({"lm_head.weight": SHARD})), MissingTensorError, "does not hold it", SHARD,
     "lm_head.weight"),
    (in_shard(lambda tensors: tensors.pop(NORM)), MissingTensorError, "expected bfloat16 [256]", None, NORM),
    (in_shard(lambda tensors: tensors.update({"model.layers.1.extra.weight": torch.zeros(3)})), UnexpectedTensorError,
     "implies no such tensor", SHARD, "model.layers.1.extra.weight"),
    (in_shard(lambda tensors: tensors.update({EMBEDDING: torch.zeros(768, 256, dtype=torch.bfloat16)})),
     UnexpectedTensorError, "already in model-1-of-3", SHARD, EMBEDDING),
    (in_shard(lambda tensors: tensors.pop(WEIGHT)), OrphanScaleError, "expected float8_e4m3fn", None, WEIGHT),
    (in_shard(lambda tensors: tensors.pop(SCALE)), OrphanScaleError, "expected float32 [1, 2]", None, SCALE),
    (of_shape(WEIGHT, 127, 256), TensorShapeError, "got [127, 256]", SHARD, WEIGHT),
    (of_shape(SCALE, 2, 2), TensorShapeError, "got [2, 2]", SHARD, SCALE),
    (of_shape(KV_B, 255, 64), TensorShapeError, "got [255, 64]", SHARD, KV_B),
    (of_shape(BIAS, 15), TensorShapeError, "got [15]", SHARD, BIAS),
    (of_dtype(WEIGHT, torch.bfloat16), TensorDtypeError, "got torch.bfloat16", SHARD, WEIGHT),
    (of_dtype(WEIGHT, torch.float8_e5m2), TensorDtypeError, "got torch.float8_e5m2", SHARD, WEIGHT),
    (of_dtype(SCALE, torch.int32), TensorDtypeError, "got torch.int32", SHARD, SCALE),
    (of_dtype("model.layers.1.mlp.gate.weight", torch.int8), TensorDtypeError, "got torch.int8", SHARD,
     "model.layers.1.mlp.gate.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "error", "says", "file", "tensor"), DAMAGES)
def test_damage_is_named(
    fp8: Path, damage: Callable[[Path], object], error: type[CheckpointError], says: str, file: str | None, tensor: str
) -> None:
    damage(fp8)
    expect(fp8, error, says, file=file, tensor=tensor)


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


def test_kv_lora_rank_that_contradicts_the_tensors(fp8: Path) -> None:
    raw = json.loads((fp8 / "config.json").read_text())
    raw["kv_lora_rank"] = 128
    (fp8 / "config.json").write_text(json.dumps(raw))
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    expect(fp8, TensorShapeError, "expected shape [144, 256] from config.json, got [80, 256]",
           file="model-1-of-3.safetensors", tensor=name)  # fmt: skip


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
