"""manifest.json beside the ranks' files: what they were made from and a SHA-256 a tensor; and its check."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from kimi_k2 import __version__
from kimi_k2.checkpoint.reader import CheckpointReader, read_header
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError, CorruptHeaderError, MissingShardError, TruncatedShardError
from kimi_k2.sharding.layout import Layout

MANIFEST = "manifest.json"
WEIGHTS = "weights"
_CHUNK = 2**22


def rank_file_name(rank: int) -> str:
    """NxDI's name of a rank's file."""
    return f"tp{rank}_sharded_checkpoint.safetensors"


def describe(reader: CheckpointReader, config: KimiK2Config, layout: Layout) -> dict[str, Any]:
    """Source, options and tool version; equal for two runs that must give the same bytes."""
    shards = {name: (reader.directory / name).stat().st_size for name in reader.index.shards}
    headers = hashlib.sha256()
    for name in reader.index.shards:
        headers.update(json.dumps(read_header(reader.directory / name)).encode())
    return {
        "tool": {"name": "kimi-k2", "version": __version__},
        "source": {
            "config_sha256": _config_digest(config),
            "headers_sha256": headers.hexdigest(),
            "shards": shards,
        },
        "options": _options(layout),
    }


def _config_digest(config: KimiK2Config) -> str:
    return hashlib.sha256(config.model_dump_json().encode()).hexdigest()


def _options(layout: Layout) -> dict[str, Any]:
    return {
        "target": layout.target,
        "experts": layout.experts,
        "moe_tp": layout.moe_tp,
        "moe_ep": layout.moe_ep,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "spmd_rank": layout.has_spmd_rank,
    }


def made_layout(directory: str | Path) -> Layout:
    """The layout of a finished conversion.

    Raises:
        MissingShardError, CorruptHeaderError: see `load_manifest`.
    """
    directory = Path(directory)
    try:
        options = load_manifest(directory)["made_from"]["options"]
        return Layout(
            options["moe_tp"], options["moe_ep"], target=options["target"], experts=options["experts"],
            dtype=getattr(torch, options["dtype"]), spmd_rank=options["spmd_rank"] or None,
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
    for option, wanted in _options(layout).items():
        if made_from["options"].get(option) != wanted:
            raise ConfigError(
                f"converted with {made_from['options'].get(option)}, expected {wanted}", field=option, file=path
            )
    if made_from["source"]["config_sha256"] != _config_digest(config):
        raise ConfigError("converted from a checkpoint with another configuration", file=path)


def load_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a finished conversion.

    Raises:
        MissingShardError, CorruptHeaderError: there is none, or it is no manifest.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        _ = content["checksums"], content["files"]
    except FileNotFoundError:
        raise MissingShardError("no such file: the conversion is not finished", file=path) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptHeaderError(f"not a manifest: {error}", file=path) from None
    return dict(content)


def verify(directory: str | Path, on_bytes: Callable[[int], None] | None = None) -> Iterator[str]:
    """Read everything again; yields the name of each file that is as the manifest says.

    Raises:
        MissingShardError, TruncatedShardError, CheckpointError: a file or a tensor is not; the first is named.
    """
    directory = Path(directory)
    manifest = load_manifest(directory)
    for name, size in manifest["files"].items():
        path = directory / WEIGHTS / name
        if not path.is_file():
            raise MissingShardError("no such file", file=path)
        if path.stat().st_size != size:
            raise TruncatedShardError(f"expected {size} bytes, got {path.stat().st_size}", file=path)
        try:
            header = read_header(path)
        except ValueError as error:
            raise CorruptHeaderError(f"the header cannot be parsed: {error}", file=path) from None
        expected = manifest["checksums"][name]
        if header.keys() != expected.keys():
            other = sorted(header.keys() ^ expected.keys())[0]
            raise CheckpointError("in the manifest or in the file, but not in both", file=path, tensor=other)
        with path.open("rb") as file:
            base = 8 + int.from_bytes(file.read(8), "little")
            for tensor, entry in header.items():
                start, end = entry["data_offsets"]
                digest = hashlib.sha256()
                file.seek(base + start)
                while start < end:
                    chunk = file.read(min(_CHUNK, end - start))
                    if not chunk:
                        raise TruncatedShardError("ends before this tensor does", file=path, tensor=tensor)
                    digest.update(chunk)
                    start += len(chunk)
                    if on_bytes:
                        on_bytes(len(chunk))
                if digest.hexdigest() != expected[tensor]:
                    raise CheckpointError("the bytes differ from the manifest's checksum", file=path, tensor=tensor)
        yield name
