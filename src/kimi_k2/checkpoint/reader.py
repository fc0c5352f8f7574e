"""Streaming reader: one shard open at a time, tensors as lazy slices, memory bounded by what the caller keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kimi_k2.checkpoint.index import CheckpointIndex
from kimi_k2.checkpoint.names import IGNORED, companions, expected_tensors
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import (
    CheckpointError,
    CorruptHeaderError,
    MissingTensorError,
    OrphanScaleError,
    TensorDtypeError,
    TensorShapeError,
    TruncatedShardError,
    UnexpectedTensorError,
)

# safetensors maps a shard into memory; touched pages stay resident until the map goes. Reopening the shard
# after this many bytes keeps a 17 GB shard from counting as 17 GB.
RELEASE_BYTES = 256 * 2**20

SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
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

_FLOATING = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: shard file name, dtype, shape."""

    shard: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class CheckpointReader:
    """A checkpoint directory, read shard by shard.

    Headers of all shards are read and checked when the reader is made; tensor data only on request. Names
    are without the `language_model.` prefix of K2.5 when `prefix` is given; what lies outside the prefix is
    then left out, as is everything that `names.IGNORED` matches.

    Args:
        directory: checkpoint directory with an index, or a lone `model.safetensors`.
        prefix: tensor-name prefix of the language model, `KimiK2Config.tensor_prefix`.

    Raises:
        CorruptHeaderError, TruncatedShardError, MissingShardError, MissingTensorError, UnexpectedTensorError:
            the index, a shard's header or a shard's length is wrong; the message names file and tensor.
    """

    def __init__(self, directory: str | Path, prefix: str = "") -> None:
        self.index = CheckpointIndex.open(directory)
        self.directory = self.index.directory
        self.prefix = prefix
        self.tensors: dict[str, StoredTensor] = {}
        self._by_shard: dict[str, list[str]] = {}
        self._open_shard: str | None = None
        self._handle: Any = None
        self._delivered = 0
        for shard in self.index.shards:
            self._by_shard[shard] = self._read_header(shard)
        self._check_index()
        self._release()

    @classmethod
    def for_config(cls, directory: str | Path, config: KimiK2Config) -> CheckpointReader:
        """Open with the prefix that `config` implies and check every tensor against it."""
        reader = cls(directory, config.tensor_prefix)
        reader.validate(config)
        return reader

    # -- headers -------------------------------------------------------------------------------------

    def _read_header(self, shard: str) -> list[str]:
        handle = self._acquire(shard)
        keys = handle.offset_keys() if hasattr(handle, "offset_keys") else handle.keys()
        names = []
        for key in keys:
            name = self._strip(key)
            if name is None:
                continue
            view = handle.get_slice(key)
            code = view.get_dtype()
            if code not in SAFETENSORS_DTYPES:
                raise TensorDtypeError(f"unknown dtype {code}", file=self.directory / shard, tensor=key)
            if name in self.tensors:
                raise UnexpectedTensorError(
                    f"already in {self.tensors[name].shard}", file=self.directory / shard, tensor=key
                )
            self.tensors[name] = StoredTensor(shard, SAFETENSORS_DTYPES[code], tuple(view.get_shape()))
            names.append(name)
        return names

    def _strip(self, key: str) -> str | None:
        if self.prefix:
            if not key.startswith(self.prefix):
                return None
            key = key[len(self.prefix) :]
        return None if IGNORED.search(key) else key

    def _check_index(self) -> None:
        if self.index.weight_map is None:
            return
        indexed = {name: shard for key, shard in self.index.weight_map.items() if (name := self._strip(key))}
        for name, shard in indexed.items():
            stored = self.tensors.get(name)
            if stored is None or stored.shard != shard:
                raise MissingTensorError(
                    "the index puts this tensor into this shard, but the shard does not hold it",
                    file=self.directory / shard,
                    tensor=self.prefix + name,
                )
        for name, stored in self.tensors.items():
            if name not in indexed:
                raise MissingTensorError(
                    "this shard holds a tensor that the index does not name",
                    file=self.directory / stored.shard,
                    tensor=self.prefix + name,
                )

    def validate(self, config: KimiK2Config) -> None:
        """Check that exactly the tensors `config` implies are there, with their shapes and dtypes.

        An unquantized tensor may be BF16, F16 or F32; a quantized one must have its own format's dtype.

        Raises:
            OrphanScaleError, MissingTensorError, UnexpectedTensorError, TensorShapeError, TensorDtypeError.
        """
        for name, stored in self.tensors.items():
            for other in companions(name):
                if other not in self.tensors:
                    raise OrphanScaleError(
                        f"stands alone; expected '{self.prefix}{other}' beside it",
                        file=self.directory / stored.shard,
                        tensor=self.prefix + name,
                    )
        known = set()
        for spec in expected_tensors(config):
            known.add(spec.name)
            stored_or_none = self.tensors.get(spec.name)
            if stored_or_none is None:
                is_scale = spec.name.endswith("weight_scale_inv")
                kind = OrphanScaleError if is_scale and spec.name[:-10] in self.tensors else MissingTensorError
                raise kind(
                    f"missing from the checkpoint; expected {_describe(spec.dtype, spec.shape)}",
                    file=self.directory,
                    tensor=self.prefix + spec.name,
                )
            where: dict[str, Any] = {
                "file": self.directory / stored_or_none.shard,
                "tensor": self.prefix + spec.name,
            }
            if stored_or_none.shape != spec.shape:
                raise TensorShapeError(
                    f"expected shape {list(spec.shape)} from config.json, got {list(stored_or_none.shape)}",
                    **where,
                )
            same_kind = spec.dtype in _FLOATING and stored_or_none.dtype in _FLOATING
            if stored_or_none.dtype != spec.dtype and not same_kind:
                raise TensorDtypeError(f"expected {spec.dtype}, got {stored_or_none.dtype}", **where)
        for name, stored in self.tensors.items():
            if name not in known:
                raise UnexpectedTensorError(
                    f"config.json implies no such tensor ({_describe(stored.dtype, stored.shape)})",
                    file=self.directory / stored.shard,
                    tensor=self.prefix + name,
                )

    # -- data ----------------------------------------------------------------------------------------

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors this reader would deliver."""
        return sum(stored.nbytes for stored in self.tensors.values())

    def names(self) -> list[str]:
        """All tensor names in shard order, within a shard in file order."""
        return [name for shard in self.index.shards for name in self._by_shard[shard]]

    def get(self, name: str) -> Tensor:
        """One tensor, mapped from its shard; pages are read when touched.

        Raises:
            MissingTensorError: the checkpoint has no such tensor.
        """
        return self._fetch(name, lambda handle, key: handle.get_tensor(key))

    def get_slice(self, name: str, *index: slice) -> Tensor:
        """A rectangular part of a tensor, e.g. `get_slice(name, slice(0, 128))`; only that part is read."""
        return self._fetch(name, lambda handle, key: handle.get_slice(key)[index])

    def stream(self, wanted: Callable[[str], bool] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor (or those that `wanted` accepts) once, in shard and file order.

        A tensor is a view of the mapped shard: drop or copy it before long, since memory is held while it lives.
        """
        for name in self.names():
            if wanted is None or wanted(name):
                yield name, self.get(name)

    def _fetch(self, name: str, read: Callable[[Any, str], Tensor]) -> Tensor:
        stored = self.tensors.get(name)
        if stored is None:
            raise MissingTensorError("no such tensor", file=self.directory, tensor=self.prefix + name)
        if self._delivered >= RELEASE_BYTES:
            self._release()
        handle = self._acquire(stored.shard)
        try:
            tensor = read(handle, self.prefix + name)
        except (SafetensorError, OSError, IndexError) as error:
            raise CheckpointError(
                f"cannot be read: {error}", file=self.directory / stored.shard, tensor=self.prefix + name
            ) from error
        self._delivered += tensor.nbytes
        return tensor

    def _acquire(self, shard: str) -> Any:
        if self._open_shard != shard:
            self._release()
            path = self.directory / shard
            try:
                self._handle = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise _diagnose(path, error) from None
            self._open_shard = shard
        return self._handle

    def _release(self) -> None:
        self._open_shard, self._handle, self._delivered = None, None, 0


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _diagnose(path: Path, error: Exception) -> CheckpointError:
    """Turn safetensors' message into an error that says whether the file is short or its header is bad."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if len(prefix) < 8:
            return TruncatedShardError(f"{size} bytes; a safetensors file starts with 8 bytes of length", file=path)
        length = int.from_bytes(prefix, "little")
        if length > size - 8:
            return TruncatedShardError(
                f"the header alone should have {length} bytes, the file has {size} (truncated, or no safetensors)",
                file=path,
            )
        header = file.read(length)
    try:
        entries = json.loads(header)
        ends = [(entry["data_offsets"][1], name) for name, entry in entries.items() if name != "__metadata__"]
        expected, last = max(ends, default=(0, ""))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return CorruptHeaderError(f"the safetensors header cannot be parsed ({error})", file=path)
    if size != 8 + length + expected:
        return TruncatedShardError(
            f"expected {8 + length + expected} bytes by its header, got {size}", file=path, tensor=last
        )
    return CorruptHeaderError(f"the safetensors header is inconsistent ({error})", file=path)
