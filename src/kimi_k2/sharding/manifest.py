"""manifest.json beside the ranks' files: what they were made from, their tensors, and a checksum a tensor.

While a conversion is unfinished, journal.jsonl: the same origin, then a line a layer that is whole on the disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from kimi_k2 import __version__
from kimi_k2.checkpoint.index import DTYPE_CODES, DTYPES
from kimi_k2.checkpoint.writer import write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError, CorruptHeaderError, MissingShardError
from kimi_k2.files import open_output, parse_json, read_bytes, read_data
from kimi_k2.limits import JSON_BYTES
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.sharding.errors import ConversionError
from kimi_k2.sharding.layout import Decode, Layout, ShardingPlan
from kimi_k2.sharding.rank_file import FIRST_CHECKSUM, FileLayout

MANIFEST = "manifest.json"
WEIGHTS = "weights"
# The vision tower under the checkpoint's own names. It has 0.4 B parameters and works on whole images, so ranks do not
# cut it; each reads what it needs.
VISION_FILE = "vision.safetensors"


def rank_file_name(rank: int) -> str:
    """NxDI's name of a rank's file."""
    return f"tp{rank}_sharded_checkpoint.safetensors"


def vision_layout(entry: dict[str, Any]) -> FileLayout:
    """Where the tensors of a manifest's entry lie in the file."""
    tensors = entry["tensors"].items()
    return FileLayout.of(TensorSpec(name, DTYPES[one["dtype"]], tuple(one["shape"])) for name, one in tensors)


def describe(config: KimiK2Config, layout: Layout, source: Mapping[str, Any]) -> dict[str, Any]:
    """Source, options and tool version.

    Args:
        config: of the checkpoint.
        layout: options of the conversion.
        source: what `source.identify` gave of the checkpoint.
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


# Fields of Layout that are written where they are set.
_ADDED = ("decode", "query_group")
# What files said before there was `decode`.
_BEFORE = ("early_router", "early_qkv_a", "shared_tiles", "attention_tiles")


def _options(layout: Layout) -> dict[str, Any]:
    options = {
        "target": layout.target,
        "experts": layout.experts,
        "moe_tp": layout.moe_tp,
        "moe_ep": layout.moe_ep,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "spmd_rank": layout.has_spmd_rank,
    }
    return options | {name: value for name in _ADDED if (value := getattr(layout, name)) not in (None, "xla", 0)}


def checked_options(options: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Options of a manifest.

    Raises:
        ConfigError: the files are of a form of decode that is no more.
    """
    for name in (*_BEFORE, "decode"):
        if name in options and options[name] not in get_args(Decode):
            got = f"{options[name]!r} is no form of decode any more"
            raise ConfigError(f"{got}: convert again with --decode layers", field=name, file=file)
    return dict(options)


def made_layout(directory: str | Path) -> Layout:
    """The layout of a finished conversion.

    Raises:
        MissingShardError, CorruptHeaderError: see `load_manifest`.
    """
    directory = Path(directory)
    try:
        options = checked_options(load_manifest(directory)["made_from"]["options"], directory / MANIFEST)
        return Layout(
            options["moe_tp"], options["moe_ep"], target=options["target"], experts=options["experts"],
            dtype=getattr(torch, options["dtype"]), spmd_rank=options["spmd_rank"] or None,
            **{name: options[name] for name in _ADDED if name in options},
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptHeaderError(f"no options of a conversion: {error}", file=directory / MANIFEST) from None


def check_made_for(directory: str | Path, config: KimiK2Config, layout: Layout) -> None:
    """Refuse a finished conversion of another model or for another layout; the checkpoint need not be there.

    Raises:
        MissingShardError, CorruptHeaderError: see `load_manifest`.
        ConfigError: naming the first option that differs.
    """
    path = Path(directory) / MANIFEST
    made_from = load_manifest(Path(directory))["made_from"]
    options = checked_options(made_from["options"], path)
    for option, wanted in {**dict.fromkeys(_ADDED), **_options(layout)}.items():
        if options.get(option) != wanted:
            raise ConfigError(f"converted with {options.get(option)}, expected {wanted}", field=option, file=path)
    if made_from["source"]["config_sha256"] != _config_digest(config):
        raise ConfigError("converted from a checkpoint with another configuration", file=path)


def write_manifest(
    output: Path,
    made_from: Mapping[str, Any],
    plan: ShardingPlan,
    errors: Mapping[int, Mapping[str, float]],
    checksums: Sequence[Mapping[str, str]],
    checksum: str,
    vision: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write what a finished conversion consists of, with a checksum of its own; returns the content.

    Args:
        output: directory of the conversion.
        made_from: what `describe` gave.
        plan: of the files.
        errors: by layer.
        checksums: by rank and tensor.
        checksum: their kind.
        vision: entry of the tower's file: file, bytes, tensors, and a checksum a tensor.

    Raises:
        CheckpointError: the disk is full.
    """
    total = ConversionError()
    for layer in sorted(errors):
        sums = {name: value for name, value in errors[layer].items() if name != "relative_l2"}
        total.add(ConversionError(**sums))  # type: ignore[arg-type]
    specs = [tensor.spec() for tensor in plan.tensors]
    size = FileLayout.of(specs).nbytes
    content: dict[str, Any] = {
        "made_from": made_from,
        "files": {rank_file_name(rank): size for rank in range(plan.layout.ranks)},
        "tensors": {spec.name: {"dtype": DTYPE_CODES[spec.dtype], "shape": list(spec.shape)} for spec in specs},
        "errors": {"layers": {str(layer): errors[layer] for layer in sorted(errors)}, "total": total.as_dict()},
        "checksum": checksum,
        "checksums": {rank_file_name(rank): dict(sorted(sums.items())) for rank, sums in enumerate(checksums)},
    }
    if vision is not None:
        content["vision"] = vision
    content["sha256"] = _own_checksum(content)
    try:
        write_json(output / MANIFEST, content)
    except OSError as error:
        raise CheckpointError(f"cannot be written: {error.strerror}", file=output / MANIFEST) from None
    return content


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
        missing = {"made_from", "files", "tensors", "errors", "checksums", "sha256"} - set(content)
    except FileNotFoundError:
        raise MissingShardError("no such file: not the output of `convert`, or it is not finished", file=path) from None
    except TypeError:
        raise CorruptHeaderError("not a manifest: expected an object", file=path) from None
    if missing:
        raise CorruptHeaderError(f"not a manifest of this version: no {sorted(missing)[0]!r}", file=path)
    if content["sha256"] != _own_checksum(content):
        raise CorruptHeaderError("damaged or edited: its own checksum differs", file=path)
    return dict(content)


JOURNAL = "journal.jsonl"


class FinishedLayer(NamedTuple):
    """A line: the layer, its conversion error, and checksums by rank and tensor."""

    layer: int
    error: dict[str, float] | None
    checksums: list[dict[str, str]]


class Begun(NamedTuple):
    """What a journal tells: what the conversion is made from, the kind of its checksums, its finished layers."""

    made_from: dict[str, Any]
    checksum: str
    layers: list[FinishedLayer]


class Journal:
    """Lines appended and flushed one by one; one that a kill cut off or that is damaged counts for nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Begun | None:
        """None if the conversion has not begun.

        Raises:
            ConfigError: the first line is damaged, so that nothing is known.
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
            made_from = first["made_from"]
            _ = made_from["source"]["shards"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError("line 1 is damaged; delete the output directory", file=self.path) from None
        finished = []
        for line in lines[1:]:
            try:
                entry = parse_json(line)
                finished.append(FinishedLayer(int(entry["layer"]), entry["error"], list(entry["checksums"])))
            except (ValueError, KeyError, TypeError):
                continue
        return Begun(dict(made_from), first.get("checksum", FIRST_CHECKSUM), finished)

    def begin(self, made_from: dict[str, Any], checksum: str) -> None:
        """Start anew."""
        self._append({"made_from": made_from, "checksum": checksum}, anew=True)

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
