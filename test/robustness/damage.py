"""Tools that damage a checkpoint: JSON members, headers and values of shards, files; and what a damage should bring."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_k2.checkpoint.index import header_bytes

Damage = Callable[[Path], object]
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
DELETED = object()
SHARD = "model-2-of-3.safetensors"
EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@dataclass(frozen=True)
class Kind:
    """One kind of malformed checkpoint.

    Attributes:
        base: the fixture that is damaged; empty for any.
        damage: changes a private copy before a command runs.
        says: what the error names: a file, tensor or field.
        refused: the commands that must refuse it, by first letter: inspect, plan, convert, generate, dialogue (chat),
            a capture. The others read nothing that is damaged, or what they read is no damage, and must end as on the
            sound checkpoint. None where either is right: a refusal, or whatever the changed checkpoint says.
        meanwhile: done while a command runs.
        either: commands that may do either, in spite of `refused`.
    """

    name: str
    base: str
    damage: Damage
    says: str
    refused: str | None = "icg"
    meanwhile: Damage | None = None
    either: str = ""

    def refused_by(self, command: str) -> bool | None:
        """Whether a command must refuse it; None where it may."""
        letter = command[0]
        return None if self.refused is None or letter in self.either else letter in self.refused


def private_copy(source: Path, target: Path) -> Path:
    """A copy whose files share the disk until they are damaged: `own` gives a file bytes of its own."""
    return Path(shutil.copytree(source, target, copy_function=os.link))


def own(path: Path) -> Path:
    """The same path, no other name of its file."""
    if path.is_file():
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    return path


def write(name: str, content: bytes | str) -> Damage:
    """A file's whole content."""

    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def remove(name: str) -> Damage:
    return lambda directory: (directory / name).unlink()


def sparse(name: str, size: int) -> Damage:
    """A file of that size that takes no space."""

    def change(directory: Path) -> None:
        os.truncate(own(directory / name), size)

    return change


def as_directory(name: str) -> Damage:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).mkdir()

    return change


def looping_link(name: str) -> Damage:
    def change(directory: Path) -> None:
        (directory / name).unlink()
        (directory / name).symlink_to(name)

    return change


def put(raw: Any, place: str, value: object) -> None:
    """Set, or with DELETED remove, the member at a dotted place."""
    *path, last = place.split("/")
    for name in path:
        raw = raw[name]
    if value is DELETED:
        del raw[last]
    else:
        raw[last] = value


def member(name: str, place: str, value: object) -> Damage:
    """A member of a JSON file; places are parted by slashes."""

    def change(directory: Path) -> None:
        path = own(directory / name)
        raw = json.loads(path.read_text())
        put(raw, place, value)
        path.write_text(json.dumps(raw))

    return change


def config(place: str, value: object) -> Damage:
    return member(CONFIG, place, value)


def index(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """The index, as an object."""

    def change(directory: Path) -> None:
        path = own(directory / INDEX)
        raw = json.loads(path.read_text())
        edit(raw)
        path.write_text(json.dumps(raw))

    return change


def header(edit: Callable[[dict[str, Any]], object], shard: str = SHARD) -> Damage:
    """The header of a shard, as an object; the data stay."""

    def change(directory: Path) -> None:
        path = own(directory / shard)
        data, old = path.read_bytes(), header_bytes(path)
        entries = json.loads(old[8:])
        edit(entries)
        raw_header(json.dumps(entries).encode(), shard, data[len(old) :])(directory)

    return change


def raw_header(text: bytes, shard: str = SHARD, data: bytes | None = None) -> Damage:
    """The header's text, whatever it is; the data stay."""

    def change(directory: Path) -> None:
        path = own(directory / shard)
        body = path.read_bytes()[len(header_bytes(path)) :] if data is None else data
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)

    return change


def entry(tensor: str, **changes: object) -> Damage:
    """Members of a tensor's entry in the header."""

    def edit(entries: dict[str, Any]) -> None:
        for key, value in changes.items():
            put(entries, f"{tensor}/{key}", value)

    return header(edit)


def renamed(tensor: str, name: str, *, indexed: bool) -> Damage:
    """Another name for a tensor, in the index too or not."""

    def change(directory: Path) -> None:
        header(lambda entries: entries.update({name: entries.pop(tensor)}))(directory)
        if indexed:
            index(lambda raw: raw["weight_map"].update({name: raw["weight_map"].pop(tensor)}))(directory)

    return change


def cut(name: str, keep: Callable[[int], int]) -> Damage:
    """The first bytes of a file, as many as `keep` says of its size; more are zeros."""

    def change(directory: Path) -> None:
        path = own(directory / name)
        os.truncate(path, keep(path.stat().st_size))

    return change


def value(tensor: str, content: bytes, place: int = 0) -> Damage:
    """Bytes of a tensor's data, in whatever shard it lies, from byte `place` on."""

    def change(directory: Path) -> None:
        shard = json.loads((directory / INDEX).read_text())["weight_map"][tensor]
        path = own(directory / shard)
        head = header_bytes(path)
        start, _ = json.loads(head[8:])[tensor]["data_offsets"]
        with path.open("r+b") as file:
            file.seek(len(head) + start + place)
            file.write(content)

    return change


def line(name: str, number: int, content: bytes | None) -> Damage:
    """A line of a text file; None removes it."""

    def change(directory: Path) -> None:
        path = own(directory / name)
        lines = path.read_bytes().splitlines(keepends=True)
        lines[number : number + 1] = [] if content is None else [content + b"\n"]
        path.write_bytes(b"".join(lines))

    return change
