"""Tools that damage a checkpoint: JSON members, headers and values of shards, files; and what a damage should bring."""

from __future__ import annotations

import json
import os
import shutil
import socket
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
        damage: changes a private copy before it is read.
        says: what the error names: a file, tensor or field.
        refused: what must refuse it, `load` or `convert`; the other reads nothing that is damaged, or what it reads is
            no damage, and must end as on the sound checkpoint. None where either is right: a refusal, or whatever the
            changed checkpoint says.
    """

    name: str
    base: str
    damage: Damage
    says: str
    refused: tuple[str, ...] | None = ("load", "convert")


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


def damaging(change: Callable[..., object]) -> Callable[..., Damage]:
    """A damage by its arguments, of a function that takes the directory before them."""
    return lambda *values, **named: lambda directory: change(directory, *values, **named)


@damaging
def write(directory: Path, name: str, content: bytes | str) -> None:
    """A file's whole content."""
    remove(name)(directory)
    (directory / name).write_bytes(content.encode() if isinstance(content, str) else content)


@damaging
def remove(directory: Path, name: str) -> None:
    (directory / name).unlink(missing_ok=True)


@damaging
def sparse(directory: Path, name: str, size: int) -> None:
    """A file of that size that takes no space."""
    os.truncate(own(directory / name), size)


@damaging
def placed(directory: Path, name: str, make: Callable[[Path], object]) -> None:
    """Something else in a file's place."""
    remove(name)(directory)
    make(directory / name)


def as_directory(name: str) -> Damage:
    return placed(name, Path.mkdir)


def linked(target: str) -> Callable[[Path], None]:
    """Makes a link, to itself by its own name."""
    return lambda path: path.symlink_to(target)


def bound(path: Path) -> None:
    """Makes a socket, whose name has at most 108 bytes."""
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)


def put(raw: Any, place: str, value: object) -> None:
    """Set, or with DELETED remove, the member at a dotted place."""
    *path, last = place.split("/")
    for name in path:
        raw = raw[name]
    if value is DELETED:
        del raw[last]
    else:
        raw[last] = value


@damaging
def rewritten(directory: Path, name: str, edit: Callable[[Any], object]) -> None:
    """A JSON file, as an object."""
    path = own(directory / name)
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def member(name: str, place: str, value: object) -> Damage:
    """A member of a JSON file; places are parted by slashes."""
    return rewritten(name, lambda raw: put(raw, place, value))


def config(place: str, value: object) -> Damage:
    return member(CONFIG, place, value)


def index(edit: Callable[[dict[str, Any]], object]) -> Damage:
    """The index, as an object."""
    return rewritten(INDEX, edit)


@damaging
def header(directory: Path, edit: Callable[[dict[str, Any]], object], shard: str = SHARD) -> None:
    """The header of a shard, as an object; the data stay."""
    entries = json.loads(header_bytes(directory / shard)[8:])
    edit(entries)
    raw_header(json.dumps(entries).encode(), shard)(directory)


@damaging
def raw_header(directory: Path, text: bytes, shard: str = SHARD) -> None:
    """The header's text, whatever it is; the data stay."""
    path = own(directory / shard)
    data = path.read_bytes()[len(header_bytes(path)) :]
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def entry(tensor: str, **changes: object) -> Damage:
    """Members of a tensor's entry in the header."""
    return header(lambda entries: entries.update({tensor: _changed(entries[tensor], changes)}))


def _changed(entry: dict[str, Any], changes: dict[str, object]) -> dict[str, Any]:
    return {key: value for key, value in (entry | changes).items() if value is not DELETED}


@damaging
def renamed(directory: Path, tensor: str, name: str, *, indexed: bool) -> None:
    """Another name for a tensor, in the index too or not."""
    header(lambda entries: entries.update({name: entries.pop(tensor)}))(directory)
    if indexed:
        index(lambda raw: raw["weight_map"].update({name: raw["weight_map"].pop(tensor)}))(directory)


@damaging
def edited(directory: Path, name: str, edit: Callable[[bytes], bytes]) -> None:
    """A file's bytes."""
    path = own(directory / name)
    path.write_bytes(edit(path.read_bytes()))


@damaging
def value(directory: Path, tensor: str, content: bytes) -> None:
    """The first bytes of a tensor's data, in whatever shard it lies."""
    shard = json.loads((directory / INDEX).read_text())["weight_map"][tensor]
    path = own(directory / shard)
    head = header_bytes(path)
    start, _ = json.loads(head[8:])[tensor]["data_offsets"]
    with path.open("r+b") as file:
        file.seek(len(head) + start)
        file.write(content)


@damaging
def line(directory: Path, name: str, number: int, content: bytes | None) -> None:
    """A line of a text file; None removes it."""
    path = own(directory / name)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number : number + 1] = [] if content is None else [content + b"\n"]
    path.write_bytes(b"".join(lines))
