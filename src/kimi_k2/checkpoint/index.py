"""What files say of their tensors: `model.safetensors.index.json`, and the headers of safetensors files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from kimi_k2.errors import CorruptHeaderError, MissingShardError, TruncatedShardError
from kimi_k2.files import check_regular, is_there, open_regular, parse_json, read_data
from kimi_k2.limits import NAME_CHARACTERS, SAFETENSORS_HEADER_BYTES, SHARDS

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class CheckpointIndex:
    """Tensor name -> shard file of a Hugging Face checkpoint directory.

    Attributes:
        directory: the checkpoint directory.
        shards: shard file names, in the order in which the index first names them by number.
        weight_map: stored tensor name -> shard file name; None when a lone `model.safetensors` has no index.
        total_size: bytes of all tensors as the index states it, if it does.
    """

    directory: Path
    shards: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    total_size: int | None = None

    @classmethod
    def open(cls, directory: str | Path) -> CheckpointIndex:
        """Read the index and check that every shard it names is there.

        Raises:
            CorruptHeaderError: the index is not JSON of the expected form.
            MissingShardError: there is neither an index nor a `model.safetensors`, or shards are missing.
        """
        directory = Path(directory)
        if not is_there(directory / INDEX_NAME):
            if is_there(directory / SINGLE_NAME):
                return cls(directory, (SINGLE_NAME,), None)
            raise MissingShardError(f"expected {INDEX_NAME} or {SINGLE_NAME} in this directory", file=directory)
        index = cls.read(directory)
        missing = [shard for shard in index.shards if not (directory / shard).exists()]
        if missing:
            assert index.weight_map is not None
            lost = next(name for name, shard in index.weight_map.items() if shard == missing[0])
            more = f" (and {len(missing) - 1} more shards)" if len(missing) > 1 else ""
            raise MissingShardError(
                f"the index puts this tensor into a file that is not there{more}",
                file=directory / missing[0],
                tensor=lost,
            )
        return index

    @classmethod
    def read(cls, directory: Path) -> CheckpointIndex:
        """What the index says; the shards need not be there.

        Raises:
            CorruptHeaderError: the index is not JSON of the expected form.
            MissingShardError: there is none.
        """
        path = directory / INDEX_NAME
        try:
            raw = read_data(path)
        except FileNotFoundError:
            raise MissingShardError("no such file, or a link to none", file=path) from None
        weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise CorruptHeaderError("expected a non-empty object 'weight_map'", file=path)
        # What is no text does not end as a shard's name does, as text either.
        for shard, name in {str(shard): name for name, shard in weight_map.items()}.items():
            if Path(shard).name != shard or not _is_shard(shard):
                raise CorruptHeaderError(
                    f"expected the name of a .safetensors file beside the index, got {weight_map[name]!r}",
                    file=path,
                    tensor=name,
                )
        shards = tuple(sorted(set(weight_map.values()), key=_natural))
        if len(shards) > SHARDS:
            raise CorruptHeaderError(f"expected at most {SHARDS} shards, got {len(shards)}", file=path)
        return cls(directory, shards, weight_map, stated_size(raw))


def stated_size(index: Mapping[str, Any]) -> int | None:
    """Bytes that an index states of all its tensors.

    Only shown, never relied on: what is no size counts as none.
    """
    metadata = index.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(total, bool):
        return None
    return int(total) if isinstance(total, (int, float)) and math.isfinite(total) and total >= 0 else None


def _is_shard(name: str) -> bool:
    return name.endswith(".safetensors") and len(name) <= NAME_CHARACTERS and "\0" not in name


def _natural(name: str) -> tuple[str | int, ...]:
    """Sort key that puts model-2-of-61 before model-10-of-61: the names are not zero-padded."""
    return tuple(int(piece) if number % 2 else piece for number, piece in enumerate(re.split(r"(\d+)", name)))


DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}


def open_tensors(path: Path) -> Any:
    """safetensors' `safe_open` of a regular file: it would wait for ever for a pipe's writer.

    Raises:
        OSError, SafetensorError: the file is not there, is not regular, or is damaged.
    """
    check_regular(path)
    return safe_open(path, framework="pt")


def header_bytes(path: Path) -> bytes:
    """Length prefix and JSON text of a file's header as they are stored.

    Raises:
        TruncatedShardError: the file ends within its header.
        CorruptHeaderError: the header is larger than safetensors allows.
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        prefix = file.read(8) or b""  # None: a file of /proc that has nothing to say now
        length = int.from_bytes(prefix, "little")
        if length > SAFETENSORS_HEADER_BYTES:
            raise CorruptHeaderError(
                f"claims a header of {length} bytes; at most {SAFETENSORS_HEADER_BYTES} are allowed", file=path
            )
        text = file.read(length) or b""
    if len(prefix) < 8 or len(text) < length:
        raise TruncatedShardError("ends within its header (or is no safetensors)", file=path)
    return prefix + text


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """The JSON header of a safetensors file: name -> dtype code, shape and data_offsets, in the order of the data.

    Raises:
        CorruptHeaderError: this is no such header.
        TruncatedShardError: the file has another length than its header says.
        OSError: the file cannot be read.
    """
    header, size = header_bytes(path), path.stat().st_size
    try:
        entries = parse_json(header[8:])
        entries.pop("__metadata__", None)
        ordered = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0]))
        expected = len(header) + max((int(entry["data_offsets"][1]) for entry in ordered.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise CorruptHeaderError(f"the safetensors header cannot be parsed ({error!r})", file=path) from None
    if size != expected:
        raise TruncatedShardError(
            f"expected {expected} bytes by its header, got {size}", file=path, tensor=next(reversed(ordered), None)
        )
    return ordered
