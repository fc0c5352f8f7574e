"""Streaming reader: one shard open at a time, tensors as lazy slices, memory bounded by what the caller keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, TypedDict

import torch
from safetensors import SafetensorError
from torch import Tensor

from kimi_k2.checkpoint.index import DTYPES, CheckpointIndex, open_tensors, read_header
from kimi_k2.checkpoint.names import IGNORED, STACKED, VISION, beside_weights, expected_tensors, vision_tensors
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import (
    CheckpointError,
    CorruptHeaderError,
    MissingShardError,
    MissingTensorError,
    NonfiniteError,
    OrphanScaleError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from kimi_k2.limits import NAME_CHARACTERS
from kimi_k2.quantization.rows import nonfinite
from kimi_k2.quantization.stored import Stored, StoredFormat, format_of
from kimi_k2.spellings import K2, plain_name, spelled, writer

# safetensors maps a shard into memory; touched pages stay resident until the map goes. Reopening the shard
# after this many bytes keeps a 17 GB shard from counting as 17 GB.
RELEASE_BYTES = 128 * 2**20

_FLOATING = (torch.bfloat16, torch.float16, torch.float32)
_WHOLE = (torch.int32, torch.int64)


class _Place(TypedDict):
    file: Path
    tensor: str


class StoredTensor(NamedTuple):
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
    are those of `spellings`, whoever wrote the files. What `names.IGNORED` matches is left out; `vision` brings the
    tower's tensors back.

    Args:
        directory: checkpoint directory with an index, or a lone `model.safetensors`.
        vision: deliver the vision tower and projector too.
        allow_nonfinite: deliver NaN, Inf and impossible scales too.

    Attributes:
        tensors: by name.
        spelling: whose names the files have.

    Raises:
        CorruptHeaderError, TruncatedShardError, MissingShardError, MissingTensorError, UnexpectedTensorError:
            the index, a shard's header or a shard's length is wrong; the message names file and tensor.
        NonfiniteError: (where data is read) a tensor holds NaN, Inf or impossible scales; how many.
    """

    def __init__(self, directory: str | Path, *, vision: bool = False, allow_nonfinite: bool = False) -> None:
        self.index = CheckpointIndex.open(directory)
        self.directory = self.index.directory
        self.vision = vision
        self.allow_nonfinite = allow_nonfinite
        self.quantization: StoredFormat | None = None  # known when `validate` has seen the configuration
        self.tensors: dict[str, StoredTensor] = {}
        self._by_shard: dict[str, list[str]] = {}
        self._shard_of: dict[str, str] = {}  # by stored name, ignored tensors included
        self._stored_names: dict[str, str] = {}  # where they are others
        self._open_shard: str | None = None
        self._handle: Any = None
        self._delivered = 0
        for shard in self.index.shards:
            self._by_shard[shard] = self._read_header(shard)
        self._check_index()
        self._release()
        self.spelling = writer(self._shard_of)

    @classmethod
    def for_config(
        cls, directory: str | Path, config: KimiK2Config, *, vision: bool = False, allow_nonfinite: bool = False
    ) -> CheckpointReader:
        """Open and check every tensor against `config`.

        Args:
            directory: see the class.
            config: of the checkpoint.
            vision: with the tower, if `config` has one.
            allow_nonfinite: see the class.
        """
        vision = vision and config.vision is not None
        reader = cls(directory, vision=vision, allow_nonfinite=allow_nonfinite)
        reader.validate(config)
        return reader

    # -- headers -------------------------------------------------------------------------------------

    def _read_header(self, shard: str) -> list[str]:
        with _opening(self.directory / shard):
            entries = read_header(self.directory / shard)
        self._acquire(shard)  # safetensors checks the header once more
        names = []
        for key, entry in entries.items():
            if len(key) > NAME_CHARACTERS:
                raise CorruptHeaderError(
                    f"a tensor's name of {len(key)} characters; at most {NAME_CHARACTERS} are read",
                    file=self.directory / shard,
                )
            self._shard_of[key] = shard
            name = plain_name(key)
            if IGNORED.search(name) and not (self.vision and VISION.match(name)):
                continue
            dtype = DTYPES.get(entry["dtype"])
            if dtype is None:
                raise TensorDtypeError(f"unknown dtype {entry['dtype']}", file=self.directory / shard, tensor=key)
            if name in self.tensors:
                raise UnexpectedTensorError(
                    f"already in {self.tensors[name].shard}", file=self.directory / shard, tensor=key
                )
            self.tensors[name] = StoredTensor(shard, dtype, tuple(entry["shape"]))
            if name != key:
                self._stored_names[name] = key
            names.append(name)
        return names

    def stored_name(self, name: str) -> str:
        """The name in the files of a tensor that this reader delivers as `name`, or would."""
        if name in self.tensors or self.spelling == K2 or VISION.match(name):
            return self._stored_names.get(name, name)
        return next((spelling for spelling in spelled(name) if writer([spelling]) == self.spelling), name)

    def _check_index(self) -> None:
        indexed = self.index.weight_map
        if indexed is None or indexed == self._shard_of:
            return
        for key, shard in indexed.items():
            if self._shard_of.get(key) != shard:
                raise MissingTensorError(
                    "the index puts this tensor into this shard, but the shard does not hold it",
                    file=self.directory / shard,
                    tensor=key,
                )
        key = next(key for key in self._shard_of if key not in indexed)
        raise MissingTensorError(
            "this shard holds a tensor that the index does not name",
            file=self.directory / self._shard_of[key],
            tensor=key,
        )

    def validate(self, config: KimiK2Config) -> None:
        """Check that exactly the tensors `config` implies are there, with their shapes and dtypes.

        An unquantized tensor may be BF16, F16 or F32; a quantized one must have its own format's dtype.

        Raises:
            OrphanScaleError, MissingTensorError, UnexpectedTensorError, TensorShapeError, TensorDtypeError.
        """
        self.quantization = config.quantization
        for name in self.tensors:
            if STACKED.search(name):
                raise UnexpectedTensorError(
                    "holds all experts of a layer, transformers' form in memory; expected a tensor an expert, as its"
                    " save_pretrained writes unless save_original_format=False",
                    **self._place(name),
                )
        suffixes = config.quantization.suffixes if config.quantization else ()
        self._leave_out(config)
        expected = {spec.name: spec for spec in expected_tensors(config)}
        if self.vision:
            expected |= {spec.name: spec for spec in vision_tensors(config)}
        for name, spec in expected.items():
            stored = self.tensors.get(name)
            if stored is None:
                module = name.rpartition(".")[0]
                beside = any(f"{module}.{other}" in self.tensors for other in suffixes)
                kind = OrphanScaleError if beside else MissingTensorError
                raise kind(
                    f"missing from the checkpoint; expected {_describe(spec.dtype, spec.shape)}",
                    file=self.directory,
                    tensor=self.stored_name(name),
                )
            if stored.shape != spec.shape and {stored.shape, spec.shape} != {(), (1,)}:
                raise TensorShapeError(
                    f"expected shape {list(spec.shape)} from config.json, got {list(stored.shape)}",
                    **self._place(name),
                )
            module, _, suffix = name.rpartition(".")
            alike = _WHOLE if suffix in format_of(config.quantization, module).implied else _FLOATING
            if stored.dtype != spec.dtype and not (spec.dtype in alike and stored.dtype in alike):
                raise TensorDtypeError(
                    f"expected {spec.dtype}, got {stored.dtype}",
                    **self._place(name),
                )
        for name in self.tensors.keys() - expected.keys():
            extra = self.tensors[name]
            raise UnexpectedTensorError(
                f"config.json implies no such tensor ({_describe(extra.dtype, extra.shape)})",
                **self._place(name),
            )

    def _leave_out(self, config: KimiK2Config) -> None:
        scheme, modules = config.quantization, {name: name.rpartition(".")[0] for name in self.tensors}
        unused = {name for name, module in modules.items() if beside_weights(format_of(scheme, module), name)}
        if unused:
            self.tensors = {name: stored for name, stored in self.tensors.items() if name not in unused}
            for shard, names in self._by_shard.items():
                self._by_shard[shard] = [name for name in names if name not in unused]

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

    def get(self, name: str, *, check: bool = True) -> Tensor:
        """One tensor, mapped from its shard.

        Args:
            name: without the reader's prefix.
            check: look at the values now; otherwise pages are read when touched, and `check_module` is the caller's.

        Raises:
            MissingTensorError: the checkpoint has no such tensor.
            NonfiniteError: the tensor holds NaN or Inf.
        """
        tensor = self._fetch(name, lambda handle, key: handle.get_tensor(key))
        if check:
            self._check_values(name, tensor)
        return tensor

    def check_module(self, module: str, stored: Stored, *, values: bool = True) -> None:
        """Refuse values of one module's tensors (by suffix) that cannot be right; safe to call from any thread.

        Args:
            module: name of the Linear or norm, without the reader's prefix.
            stored: its tensors by suffix.
            values: look for NaN and Inf; False if `get` has done so.

        Raises:
            NonfiniteError: NaN, Inf or scales that no quantizer makes: which tensor, and how many.
            TensorShapeError: values that state a shape state another one.
        """
        if values:
            for suffix, tensor in stored.items():
                self._check_values(f"{module}.{suffix}", tensor)
        stored_format = format_of(self.quantization, module)
        if set(stored) != set(stored_format.suffixes):
            return  # the router: a weight and a bias
        if fault := stored_format.contradiction(stored):
            raise TensorShapeError(fault[1], **self._place(f"{module}.{fault[0]}"))
        if not self.allow_nonfinite and (fault := stored_format.impossible_scales(stored)):
            raise NonfiniteError(fault[1], **self._place(f"{module}.{fault[0]}"))

    def _check_values(self, name: str, tensor: Tensor) -> None:
        if not self.allow_nonfinite and (fault := nonfinite(tensor)):
            raise NonfiniteError(fault, **self._place(name))

    def _place(self, name: str) -> _Place:
        return {"file": self.directory / self.tensors[name].shard, "tensor": self.stored_name(name)}

    def get_slice(self, name: str, *index: slice) -> Tensor:
        """A rectangular part of a tensor, e.g. `get_slice(name, slice(0, 128))`; only that part is read."""
        tensor = self._fetch(name, lambda handle, key: handle.get_slice(key)[index])
        self._check_values(name, tensor)
        return tensor

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
            raise MissingTensorError("no such tensor", file=self.directory, tensor=self.stored_name(name))
        if self._delivered >= RELEASE_BYTES:
            self._release()
        handle = self._acquire(stored.shard)
        try:
            tensor = read(handle, self.stored_name(name))
        except (SafetensorError, OSError, IndexError) as error:
            raise CheckpointError(f"cannot be read: {error}", **self._place(name)) from error
        self._delivered += tensor.nbytes
        return tensor

    def _acquire(self, shard: str) -> Any:
        if self._open_shard != shard:
            self._release()
            path = self.directory / shard
            with _opening(path):
                self._handle = open_tensors(path)
            self._open_shard = shard
        return self._handle

    def _release(self) -> None:
        self._open_shard, self._handle, self._delivered = None, None, 0


def _describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


@contextmanager
def _opening(path: Path) -> Iterator[None]:
    """Errors of opening a shard, by its name: it is gone, cannot be read, or its header is wrong."""
    try:
        yield
    except FileNotFoundError:
        raise MissingShardError("no such file", file=path) from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=path) from None
    except SafetensorError as error:
        raise CorruptHeaderError(f"the safetensors header is inconsistent ({error})", file=path) from None
