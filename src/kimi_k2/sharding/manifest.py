"""What a conversion is made from, and what of it is finished.

manifest.json stands beside the ranks' files: the source's identity, options, tensors, and a checksum a tensor. While a
conversion is unfinished, journal.jsonl has the same origin, then a line a layer that is whole on the disk.

Fine-tunes of one model have equal configurations, names, sizes and headers; only values tell them apart. Training moves
values all over a tensor, so 4 KiB of each of them do, in a second for each 100,000 tensors on a local disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash

from kimi_k2 import __version__
from kimi_k2.checkpoint.index import DTYPE_CODES, DTYPES, header_bytes, read_header
from kimi_k2.checkpoint.writer import CHECKSUM, FileLayout, write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError, CorruptHeaderError, KimiK2Warning, MissingShardError
from kimi_k2.files import errors_of, is_there, open_output, open_regular, parse_json, read_bytes, read_data
from kimi_k2.limits import JSON_BYTES
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.sharding.experts import ConversionError
from kimi_k2.sharding.layout import Layout, ShardingPlan

MANIFEST = "manifest.json"
JOURNAL = "journal.jsonl"
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
            place = first + xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass")) % (
                max(end - first - _SAMPLE, 0) + 1
            )
            digest.update(os.pread(descriptor, min(_SAMPLE, end - place), start + place))
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
        for key in ("size", "header_sha256", *(("sha256",) if hashed else ())):
            if before.get(key) != now[key]:
                what = "other bytes" if key == "sha256" else f"another {key}"
                raise ConfigError(f"made from another source: {name} has {what}", file=file)
        if not hashed and (key := _changed(before, now, _CIRCUMSTANCES)):
            way = "give an empty directory (a run with --verify-source can be resumed from a copy)"
            if "sha256" in before:
                way = "--verify-source compares its bytes"
            raise ConfigError(f"{name} was changed or copied since (its {key} differs); {way}", file=file)


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
    if difference := next((one for one in told if one), None):
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
    """The layout of a manifest or journal.

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


class FinishedLayer(NamedTuple):
    """A layer that is whole on the disk: its number, conversion error, and checksums by rank and tensor."""

    layer: int
    error: dict[str, float] | None
    checksums: list[dict[str, str]]


class Finished(NamedTuple):
    """What the conversion is made from (`describe`), and its finished layers by number."""

    made_from: dict[str, Any]
    layers: dict[int, FinishedLayer]


class Journal:
    """Lines appended and flushed one by one; one that a kill cut off or that is damaged counts for nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Finished | None:
        """None if the conversion has not begun.

        Raises:
            ConfigError: the first line is damaged, so that nothing is known.
            CorruptHeaderError: its checksums are of another kind.
        """
        try:
            data = read_bytes(self.path, JSON_BYTES, CheckpointError)
        except FileNotFoundError:
            return None
        lines = data.split(b"\n")[:-1]  # a line cut off by a kill has no newline
        if not lines:
            return None
        try:
            first = parse_json(lines[0])
            made_from, kind = dict(first["made_from"]), first["checksum"]
            _ = made_from["source"]["shards"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError("line 1 is damaged; delete the output directory", file=self.path) from None
        _check_kind(kind, self.path)
        layers = {}
        for line in lines[1:]:
            try:
                entry = parse_json(line)
                layer = FinishedLayer(int(entry["layer"]), entry["error"], list(entry["checksums"]))
            except (ValueError, KeyError, TypeError):
                continue
            layers[layer.layer] = layer
        return Finished(made_from, layers)

    def begin(self, made_from: dict[str, Any]) -> None:
        """Start anew."""
        self._append({"made_from": made_from, "checksum": CHECKSUM}, anew=True)

    def finish_layer(self, layer: FinishedLayer) -> None:
        """Say that a layer is whole on the disk."""
        self._append(layer._asdict(), anew=False)

    def _append(self, entry: dict[str, Any], *, anew: bool) -> None:
        try:
            file = open_output(self.path, truncate=anew)
            try:
                # A line that was cut off must not swallow this one.
                end = os.lseek(file, 0, os.SEEK_END)
                start = b"\n" if end and os.pread(file, 1, end - 1) != b"\n" else b""
                data = start + json.dumps(entry, separators=(",", ":")).encode() + b"\n"
                while data:
                    data = data[os.write(file, data) :]
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            room = "; make room and run the same command again" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise CheckpointError(f"cannot be written: {error.strerror}{room}", file=self.path) from None

    def remove(self) -> None:
        """The conversion is finished."""
        self.path.unlink(missing_ok=True)


def earlier(output: Path, plan: ShardingPlan, made_from: dict[str, Any]) -> Finished | None:
    """What an earlier run into this directory finished, by its manifest or journal; None if there was none.

    Args:
        output: directory of the conversion.
        plan: of the files.
        made_from: what `describe` gave now.

    Raises:
        ConfigError: it was of another source or other options, or something else is there.
        CheckpointError: see `load_manifest`, `Journal.read`.
    """
    file, what, found = output / MANIFEST, "holds a conversion", None
    if file.exists():
        found = _of_manifest(load_manifest(output), plan)
    elif found := Journal(output / JOURNAL).read():
        file, what = output / JOURNAL, "an unfinished conversion"
    elif any((output / WEIGHTS).glob("*.safetensors")):
        raise ConfigError("holds files of something else; give an empty directory", file=output)
    if found is None:
        return None

    differences = _differences(_layout_of(found.made_from, file), _layout_of(made_from, file))
    changed = [f"{name} {before}, now {now}" for name, before, now in differences]

    def rest(said: dict[str, Any]) -> dict[str, Any]:
        return {**said, "options": None, "source": {**said["source"], "shards": None}}

    if changed or rest(found.made_from) != rest(made_from):
        raise ConfigError(f"{what} of another source or other options ({'; '.join(changed) or 'source'})", file=file)
    _check_same(found.made_from["source"]["shards"], made_from["source"]["shards"], file)
    names = _names_by_layer(plan)
    # One that is damaged is as if it were not there.
    whole = {
        number: layer
        for number, layer in found.layers.items()
        if len(layer.checksums) == plan.layout.ranks and all(set(sums) == names.get(number) for sums in layer.checksums)
    }
    return found._replace(layers=whole)


def _names_by_layer(plan: ShardingPlan) -> dict[int, set[str]]:
    names: dict[int, set[str]] = {}
    for tensor in plan.tensors:
        names.setdefault(tensor.layer, set()).add(tensor.name)
    return names


def _of_manifest(manifest: dict[str, Any], plan: ShardingPlan) -> Finished:
    """A finished conversion as its journal had it."""
    errors = manifest["errors"]["layers"]
    files = [manifest["checksums"].get(rank_file_name(rank), {}) for rank in range(plan.layout.ranks)]
    layers = {
        layer: FinishedLayer(
            layer,
            errors.get(str(layer)),
            [{name: digest for name, digest in sums.items() if name in names} for sums in files],
        )
        for layer, names in _names_by_layer(plan).items()
    }
    return Finished(manifest["made_from"], layers)


def write_manifest(
    output: Path, finished: Finished, plan: ShardingPlan, vision: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Write what a finished conversion consists of, with a checksum of its own; returns the content.

    Args:
        output: directory of the conversion.
        finished: all layers.
        plan: of the files.
        vision: entry of the tower's file: file, bytes, tensors, and a checksum a tensor.

    Raises:
        CheckpointError: the disk is full.
    """
    total, errors, checksums = ConversionError(), {}, dict[str, dict[str, str]]()
    for number, layer in sorted(finished.layers.items()):
        if layer.error is not None:
            errors[str(number)] = layer.error
            sums = {name: value for name, value in layer.error.items() if name != "relative_l2"}
            total.add(ConversionError(**sums))  # type: ignore[arg-type]
        for rank, by_name in enumerate(layer.checksums):
            checksums.setdefault(rank_file_name(rank), {}).update(by_name)
    specs = [tensor.spec() for tensor in plan.tensors]
    content: dict[str, Any] = {
        "made_from": finished.made_from,
        "files": dict.fromkeys(checksums, FileLayout.of(specs).nbytes),
        "tensors": tensor_entries(specs),
        "errors": {"layers": errors, "total": total.as_dict()},
        "checksum": CHECKSUM,
        "checksums": {file: dict(sorted(sums.items())) for file, sums in checksums.items()},
    }
    if vision is not None:
        content["vision"] = vision
    content["sha256"] = _own_checksum(content)
    try:
        write_json(output / MANIFEST, content)
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror}", file=output / MANIFEST) from None
    return content


def tensor_entries(specs: Iterable[TensorSpec]) -> dict[str, Any]:
    """Tensors of a file as a manifest has them."""
    return {spec.name: {"dtype": DTYPE_CODES[spec.dtype], "shape": list(spec.shape)} for spec in specs}


def file_layout(entry: Mapping[str, Any]) -> FileLayout:
    """Where the tensors of a manifest, or of its tower's entry, lie in the file."""
    tensors = entry["tensors"].items()
    return FileLayout.of(TensorSpec(name, DTYPES[one["dtype"]], tuple(one["shape"])) for name, one in tensors)


def _own_checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of the content without `sha256`, in a form that no rewriting of the file changes."""
    rest = {name: value for name, value in content.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def load_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a finished conversion.

    Raises:
        MissingShardError, CorruptHeaderError: there is none, it is no manifest, or it was damaged or edited.
    """
    path = directory / MANIFEST
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
    _check_kind(content["checksum"], path)
    return dict(content)


def _check_kind(kind: object, file: Path) -> None:
    if kind != CHECKSUM:
        raise CorruptHeaderError(f"checksum: expected {CHECKSUM}, got {kind!r:.100}; convert again", file=file)
