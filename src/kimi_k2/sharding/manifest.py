"""What a conversion is made from, and what of it is finished.

manifest.json stands beside the ranks' files: the source's identity, options, tensors, and a checksum a tensor. Until
the conversion is finished it is manifest.json.unfinished, and replaced when another layer is whole on the disk.

Fine-tunes of one model have equal configurations, names, sizes and headers; only values tell them apart. Training moves
values all over a tensor, so 4 KiB of each of them do, in a second for each 100,000 tensors on a local disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import xxhash

from kimi_k2 import __version__
from kimi_k2.checkpoint.index import DTYPE_CODES, DTYPES, header_bytes, read_header
from kimi_k2.checkpoint.writer import CHECKSUM, RESUME, FileLayout, write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError, CorruptHeaderError, KimiK2Warning, MissingShardError
from kimi_k2.files import errors_of, is_there, open_regular, read_data
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.sharding.experts import ConversionError
from kimi_k2.sharding.layout import Layout, ShardingPlan

MANIFEST = "manifest.json"
UNFINISHED = MANIFEST + ".unfinished"
WEIGHTS = "weights"
# The vision tower under the checkpoint's own names. It has 0.4 B parameters and works on whole images, so ranks do not
# cut it; each reads what it needs.
VISION_FILE = "vision.safetensors"

_CHUNK = 2**22
# What a change of the bytes need not change, and a copy of the same bytes does.
_CIRCUMSTANCES = ("mtime_ns", "ctime_ns", "inode")
# One of a tensor lies at a place that its name draws; a smaller tensor is taken whole.
_SAMPLE = 4096
_READERS = 16


def rank_file_name(rank: int) -> str:
    """NxDI's name of a rank's file."""
    return f"tp{rank}_sharded_checkpoint.safetensors"


# -- the source ------------------------------------------------------------------------------------------------------


def identify(directory: Path, shards: Iterable[str], *, hash_bytes: bool = False) -> dict[str, dict[str, Any]]:
    """By shard: `size`, `mtime_ns`, `ctime_ns`, `inode`, `header_sha256`, `sample`; `sha256` too if `hash_bytes`."""

    def identity(shard: str) -> dict[str, Any]:
        path = directory / shard
        found = {**_status(path), "header_sha256": _header(path), "sample": _sample(path)}
        return found | ({"sha256": _sha256(path)} if hash_bytes else {})

    shards = list(shards)
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(shards, pool.map(identity, shards), strict=True))


def _status(path: Path) -> dict[str, Any]:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise MissingShardError("no such file any more", file=path) from None
    # Who writes can put the first of the times back, not the second.
    times = {"mtime_ns": status.st_mtime_ns, "ctime_ns": status.st_ctime_ns}
    return {"size": status.st_size, **times, "inode": status.st_ino}


def _header(path: Path) -> str:
    with errors_of(path, "read"):
        return hashlib.sha256(header_bytes(path)).hexdigest()


def _sample(path: Path) -> str:
    """Checksum of 4 KiB of every tensor."""
    digest, start = xxhash.xxh3_128(), len(header_bytes(path))
    with errors_of(path, "read"), open_regular(path) as file:
        descriptor = file.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # no reading ahead
        for name, entry in read_header(path).items():
            first, end = entry["data_offsets"]
            first_byte = first + xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass")) % (
                max(end - first - _SAMPLE, 0) + 1
            )
            digest.update(os.pread(descriptor, min(_SAMPLE, end - first_byte), start + first_byte))
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with errors_of(path, "read"), open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


def _changed(before: Mapping[str, Any], now: Mapping[str, Any], keys: Iterable[str]) -> str | None:
    """The first of `keys` that differs; what an older version did not note says nothing."""
    return next((key for key in keys if before.get(key, now[key]) != now[key]), None)


def check_unchanged(directory: Path, recorded: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse shards that were written to while they were read.

    Raises:
        CheckpointError: naming the first.
    """
    for name, before in recorded.items():
        now = _status(directory / name)
        if _changed(before, now, now):
            raise CheckpointError("changed while it was being converted", file=directory / name)


def _check_same(recorded: Mapping[str, Any], actual: Mapping[str, Any], file: Path) -> None:
    """Refuse to go on from another source. Where both runs hashed the bytes, they alone decide.

    Raises:
        ConfigError: naming the first shard that differs, and how.
    """
    if recorded.keys() != actual.keys():
        other = sorted(recorded.keys() ^ actual.keys())[0]
        raise ConfigError(f"made from another source: {other} is in one of them only", file=file)
    for name, before in recorded.items():
        now = actual[name]
        hashed = "sha256" in before and "sha256" in now
        key = _changed(before, now, ("size", "header_sha256", *(("sha256",) if hashed else _CIRCUMSTANCES)))
        if key in _CIRCUMSTANCES:
            way = "give an empty directory (a run with --verify-source can be resumed from a copy)"
            if "sha256" in before:
                way = "--verify-source compares its bytes"
            raise ConfigError(f"{name} was changed or copied since (its {key} differs); {way}", file=file)
        if key:
            difference = "other bytes" if key == "sha256" else f"another {key}"
            raise ConfigError(f"made from another source: {name} has {difference}", file=file)


def check_source(directory: Path, checkpoint: Path) -> None:
    """Refuse a checkpoint with other weights than those that were converted; warn where it has none to compare.

    Args:
        directory: output of a finished conversion.
        checkpoint: directory of the checkpoint that is named now.

    Raises:
        ConfigError: naming the first shard that differs, and how.
        MissingShardError, CorruptHeaderError: see `load_manifest`.
    """
    file = directory / MANIFEST
    recorded = load_manifest(directory)["made_from"]["source"]["shards"]
    missing = [name for name in recorded if not is_there(checkpoint / name)]
    if len(missing) == len(recorded) and not any(checkpoint.glob("*.safetensors")):
        untold = f"{checkpoint} holds no weights: that {file} was made from this checkpoint is not checked"
        warnings.warn(untold, KimiK2Warning, stacklevel=2)
        return
    if missing:
        raise ConfigError(f"converted from another checkpoint: {missing[0]} is not in {checkpoint}", file=file)
    with ThreadPoolExecutor(_READERS) as pool:
        told = list(pool.map(lambda name: _difference(recorded[name], checkpoint / name), recorded))
    if difference := next((line for line in told if line), None):
        raise ConfigError(difference, file=file)


def _difference(recorded: Mapping[str, Any], path: Path) -> str | None:
    """Why a shard is not the one that was converted."""
    now = _status(path)
    another = f"converted from another checkpoint than {path.parent}: {path.name} has"
    if recorded.get("size") != now["size"] or recorded.get("header_sha256") != _header(path):
        return f"{another} another size or header"
    if all(recorded.get(key) == now[key] for key in _CIRCUMSTANCES):
        return None  # the same file, and nobody has written to it
    if "sample" not in recorded:
        return (
            f"an older version wrote it, without what tells weights apart, and {path} is not the file that it read:"
            " convert again, or give a directory with config.json and the tokenizer alone"
        )
    return f"{another} other values" if recorded["sample"] != _sample(path) else None


# -- options ---------------------------------------------------------------------------------------------------------


def describe(config: KimiK2Config, layout: Layout, source: Mapping[str, Any]) -> dict[str, Any]:
    """Source, options and tool version.

    Args:
        config: of the checkpoint.
        layout: options of the conversion.
        source: what `identify` gave of the checkpoint.
    """
    return {
        "tool": {"name": "kimi-k2", "version": __version__},
        "source": {"config_sha256": _config_digest(config), "shards": dict(source)},
        "options": _options(layout),
    }


def _config_digest(config: KimiK2Config) -> str:
    # Models without a tower keep the digest that they had before there was such a field.
    absent = {"vision"} if config.vision is None else set()
    return hashlib.sha256(config.model_dump_json(exclude=absent).encode()).hexdigest()


def _options(layout: Layout) -> dict[str, Any]:
    """The fields of a layout as a manifest has them."""
    options = {field.name: getattr(layout, field.name) for field in fields(Layout)}
    return options | {"dtype": str(layout.dtype).removeprefix("torch.")}


def _differences(made: Layout, wanted: Layout) -> Iterator[tuple[str, Any, Any]]:
    """Name and both values of each option that differs."""
    now = _options(wanted)
    return ((name, value, now[name]) for name, value in _options(made).items() if value != now[name])


def _layout_of(made_from: Mapping[str, Any], file: Path) -> Layout:
    """The layout of a manifest.

    Raises:
        ConfigError: an option, or its value, is none any more.
        CorruptHeaderError: there are no options.
    """
    try:
        options = dict(made_from["options"])
        if unknown := options.keys() - {field.name for field in fields(Layout)}:
            raise ConfigError("no option of a conversion", field=min(unknown))
        if lacking := {"moe_tp", "moe_ep", "target", "experts", "dtype"} - options.keys():
            raise KeyError(min(lacking))
        return Layout(**options | {"dtype": getattr(torch, options["dtype"])})
    except ConfigError as error:
        raise ConfigError(f"{error.message}; convert again", field=error.field, file=file) from None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CorruptHeaderError(f"no options of a conversion: {error}", file=file) from None


def made_layout(directory: str | Path) -> Layout:
    """The layout of a finished conversion.

    Raises:
        MissingShardError, CorruptHeaderError: see `load_manifest`.
        ConfigError: another version wrote it, with options that are none any more.
    """
    path = Path(directory) / MANIFEST
    return _layout_of(load_manifest(path.parent)["made_from"], path)


def check_made_for(directory: str | Path, config: KimiK2Config, layout: Layout) -> None:
    """Refuse a finished conversion of another model or for another layout; the checkpoint need not be there.

    Raises:
        MissingShardError, CorruptHeaderError: see `load_manifest`.
        ConfigError: naming the first option that differs.
    """
    path = Path(directory) / MANIFEST
    made_from = load_manifest(path.parent)["made_from"]
    if difference := next(_differences(_layout_of(made_from, path), layout), None):
        option, made, wanted = difference
        raise ConfigError(f"converted with {made}, expected {wanted}", field=option, file=path)
    if made_from["source"]["config_sha256"] != _config_digest(config):
        raise ConfigError("converted from a checkpoint with another configuration", file=path)


# -- what is finished ------------------------------------------------------------------------------------------------


class Manifest:
    """The manifest of a conversion that begins or goes on.

    Args:
        output: directory of the conversion.
        plan: of the files.
        made_from: what `describe` gave.

    Attributes:
        content: what is written; errors and checksums of the layers that are whole on the disk.
        finished: an earlier run came to the end.
    """

    def __init__(self, output: Path, plan: ShardingPlan, made_from: dict[str, Any]) -> None:
        specs = [tensor.spec() for tensor in plan.tensors]
        self.output, self.finished = output, False
        self.files = [rank_file_name(rank) for rank in range(plan.layout.ranks)]
        self.content: dict[str, Any] = {
            "made_from": made_from,
            "files": dict.fromkeys(self.files, FileLayout.of(specs).nbytes),
            "tensors": tensor_entries(specs),
            "errors": {"layers": {}},
            "checksum": CHECKSUM,
            "checksums": {file: {} for file in self.files},
        }

    def take_up(self) -> bool:
        """Go on from what an earlier run into this directory noted; False if there was none.

        Raises:
            ConfigError: it was of another source or other options, or something else is there.
            CorruptHeaderError: see `load_manifest`.
        """
        self.finished = (self.output / MANIFEST).exists()
        file = self.output / (MANIFEST if self.finished else UNFINISHED)
        if not file.exists():
            if any((self.output / WEIGHTS).glob("*.safetensors")):
                raise ConfigError("holds files of something else; give an empty directory", file=self.output)
            return False
        found, wanted = load_manifest(self.output, file.name), self.content["made_from"]
        made_from = found["made_from"]
        differences = _differences(_layout_of(made_from, file), _layout_of(wanted, file))
        changed = [f"{name} {before}, now {now}" for name, before, now in differences]

        def rest(said: dict[str, Any]) -> dict[str, Any]:
            return {**said, "options": None, "source": {**said["source"], "shards": None}}

        if changed or rest(made_from) != rest(wanted):
            held = "holds a conversion" if self.finished else "an unfinished conversion"
            reason = "; ".join(changed) or "source"
            raise ConfigError(f"{held} of another source or other options ({reason})", file=file)
        _check_same(made_from["source"]["shards"], wanted["source"]["shards"], file)
        self.content |= {name: found[name] for name in ("made_from", "errors", "checksums")}
        return True

    def checksums(self, names: Collection[str]) -> list[dict[str, str]] | None:
        """Those of a layer's tensors by rank and name; None if the layer is not finished."""
        noted = [self.content["checksums"].get(file, {}) for file in self.files]
        sums = [{name: of_file[name] for name in names if name in of_file} for of_file in noted]
        return sums if all(len(of_rank) == len(names) for of_rank in sums) else None

    def finish_layer(self, layer: int, error: ConversionError, sums: list[dict[str, str]]) -> None:
        """Note that a layer is whole on the disk, with its checksums by rank and name."""
        if error.values:
            self.content["errors"]["layers"][str(layer)] = error.as_dict()
        for file, of_rank in zip(self.files, sums, strict=True):
            self.content["checksums"].setdefault(file, {}).update(of_rank)
        self.write()

    def write(self, name: str = UNFINISHED) -> None:
        """Replace the file.

        Raises:
            CheckpointError: the disk is full.
        """
        self.content.pop("sha256", None)
        self.content["sha256"] = _own_checksum(self.content)
        try:
            write_json(self.output / name, self.content)
        except OSError as error:
            more = f"; {RESUME}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise CheckpointError(f"cannot be written: {error.strerror}{more}", file=self.output / name) from None

    def finish(self, vision: Mapping[str, Any] | None) -> None:
        """Say that all is written.

        Args:
            vision: entry of the tower's file: file, bytes, tensors, and a checksum a tensor.

        Raises:
            CheckpointError: the disk is full.
        """
        total = ConversionError()
        for error in self.content["errors"]["layers"].values():
            total.add(ConversionError(**{name: value for name, value in error.items() if name != "relative_l2"}))
        self.content["errors"]["total"] = total.as_dict()
        if vision is not None:
            self.content["vision"] = vision
        self.write(MANIFEST)
        self.drop_unfinished()

    def drop_unfinished(self) -> None:
        """There is a manifest, and no need of another."""
        (self.output / UNFINISHED).unlink(missing_ok=True)


def tensor_entries(specs: Iterable[TensorSpec]) -> dict[str, Any]:
    """Tensors of a file as a manifest has them."""
    return {spec.name: {"dtype": DTYPE_CODES[spec.dtype], "shape": list(spec.shape)} for spec in specs}


def file_layout(entry: Mapping[str, Any]) -> FileLayout:
    """Where the tensors of a manifest, or of its tower's entry, lie in the file."""
    tensors = entry["tensors"].items()
    return FileLayout.of(TensorSpec(name, DTYPES[spec["dtype"]], tuple(spec["shape"])) for name, spec in tensors)


def _own_checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the content without `sha256`, in a form that no rewriting of the file changes."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_manifest(directory: Path, name: str = MANIFEST) -> dict[str, Any]:
    """The manifest of a finished conversion, or of another that a run has left.

    Raises:
        MissingShardError, CorruptHeaderError: there is none, it is no manifest, or it was damaged or edited.
    """
    path = directory / name
    try:
        content = read_data(path)
        missing = {"made_from", "files", "tensors", "errors", "checksum", "checksums", "sha256"} - set(content)
    except FileNotFoundError:
        raise MissingShardError("no such file: not the output of `convert`, or it is not finished", file=path) from None
    except TypeError:
        raise CorruptHeaderError("not a manifest: expected an object", file=path) from None
    if missing:
        raise CorruptHeaderError(f"not a manifest of this version: no {sorted(missing)[0]!r}", file=path)
    if content["sha256"] != _own_checksum(content):
        raise CorruptHeaderError("damaged or edited: its own checksum differs", file=path)
    if (kind := content["checksum"]) != CHECKSUM:
        raise CorruptHeaderError(f"checksum: expected {CHECKSUM}, got {kind!r:.100}; convert again", file=path)
    return dict(content)
