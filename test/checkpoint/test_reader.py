"""The streaming reader: whole checkpoints read exactly once; `test/robustness` has damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rewritten import rewritten, tensors_of

from kimi_k2.checkpoint.index import INDEX_NAME, CheckpointIndex
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import (
    MissingTensorError,
)
from kimi_k2.model.decoder import KimiK2ForCausalLM


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


def test_stream_goes_shard_by_shard_in_file_order(fp8: Path) -> None:
    reader = open_for_config(fp8)
    shards = [reader.tensors[name].shard for name in reader.names()]
    assert shards == sorted(shards)
    for shard in set(shards):
        offsets = json_header(fp8 / shard)
        starts = [offsets[name]["data_offsets"][0] for name in reader.names() if reader.tensors[name].shard == shard]
        assert starts == sorted(starts)


def test_slices_read_a_part(fp8: Path) -> None:
    reader = open_for_config(fp8)
    whole = reader.get("lm_head.weight")
    assert torch.equal(reader.get_slice("lm_head.weight", slice(5, 9), slice(0, 7)), whole[5:9, :7])


def test_leftovers_and_vision_tensors_are_ignored(k25_int4: Path, tmp_path: Path) -> None:
    more = {
        "vision_tower.of_another_kind.weight": torch.zeros(2),
        "language_model.model.layers.1.self_attn.rotary_emb.inv_freq": torch.zeros(56, dtype=torch.bfloat16),
    }
    directory = rewritten(k25_int4, tmp_path / "k", lambda held: {**held, **more})
    assert not any("vision" in name or "inv_freq" in name for name in open_for_config(directory).tensors)
    KimiK2ForCausalLM.from_pretrained(directory)


def test_natural_shard_order(tmp_path: Path) -> None:
    names = [f"model-{i}-of-11.safetensors" for i in (*range(1, 12), "²")]
    for name in names:
        (tmp_path / name).touch()
    weight_map = {f"t{i}": name for i, name in enumerate(reversed(names))}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map, "metadata": {"total_size": -1}}))
    index = CheckpointIndex.open(tmp_path)
    assert (list(index.shards), index.total_size) == (names, None)


def json_header(path: Path) -> dict[str, dict[str, list[int]]]:
    data = path.read_bytes()
    result: dict[str, dict[str, list[int]]] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return result


def test_no_such_tensor(fp8: Path) -> None:
    with pytest.raises(MissingTensorError, match=r"model\.layers\.99"):
        open_for_config(fp8).get("model.layers.99.input_layernorm.weight")
