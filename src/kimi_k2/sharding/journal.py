"""journal.jsonl of an unfinished conversion: what it is made from, then a line a layer that is whole on the disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from kimi_k2.errors import CheckpointError, ConfigError
from kimi_k2.files import open_output, parse_json, read_bytes
from kimi_k2.limits import JSON_BYTES
from kimi_k2.sharding.checksum import FIRST_CHECKSUM

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
            raise CheckpointError(
                f"cannot be written: {error.strerror}; make room and run the same command again", file=self.path
            ) from None

    def remove(self) -> None:
        """The conversion is finished."""
        self.path.unlink(missing_ok=True)
