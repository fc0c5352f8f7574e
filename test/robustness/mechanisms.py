"""Drawn damage by mechanism: what a file is, its size, its encoding, a number, a reference, or what happens meanwhile.

A seed draws one checkpoint's fault together with what each command must make of it.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from damage import CONFIG, INDEX, Damage, Kind, header, own

VOCABULARY, TOKENIZER = "tiktoken.model", "tokenizer_config.json"
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
# Which commands read a file, by first letter.
WEIGHTS, TEXT = "icgda", "gd"
READ_BY = {CONFIG: "ipcgda", INDEX: "ipcgda", VOCABULARY: TEXT, TOKENIZER: TEXT, TEMPLATE: TEXT, GENERATION: TEXT}


def drawn(seed: int, directory: Path) -> Kind:
    """The fault of a seed, for a checkpoint that is like the one in `directory`."""
    mechanism = MECHANISMS[seed % len(MECHANISMS)]
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    kind = _MAKERS[mechanism](random.Random(seed), shards)
    return replace(kind, name=f"{mechanism}: {kind.name}")


def _drawn(name: str, damage: Damage, refused: str | None, **more: Any) -> Kind:
    return Kind(name, "", damage, "", refused, **more)


def _readers(name: str) -> str:
    return READ_BY.get(name, WEIGHTS)


def _told_of(name: str) -> str:
    """A template that cannot be rendered ends no chat: its error answers the message."""
    return "d" if name == TEMPLATE else ""


def _instead(make: Callable[[Path], object], name: str) -> Damage:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        make(directory / name)

    return change


def _bound(path: Path) -> None:
    # A socket's name has at most 108 bytes.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


def _link_to(target: str) -> Callable[[Path], object]:
    return lambda path: path.symlink_to(target)


def _file_type(draw: random.Random, shards: list[str]) -> Kind:
    name = draw.choice([*READ_BY, *shards])
    devices = ("/dev/zero", "/dev/urandom", "/dev/full", "/dev/null", "/dev/tty", "/proc/kmsg", "/proc/self/mem",
               "/proc/kcore", "/proc/self/environ", "/sys/power/state")  # fmt: skip
    kinds: dict[str, Callable[[Path], object]] = {
        "a pipe": os.mkfifo,
        "a socket": _bound,
        "a directory": Path.mkdir,
        "a link to nothing": lambda path: path.symlink_to("nothing"),
        "a loop of links": lambda path: path.symlink_to(path.name),
        "a link to its directory": lambda path: path.symlink_to("."),
        **{f"a link to {device}": _link_to(device) for device in devices},
    }
    kind = draw.choice(list(kinds))
    return _drawn(f"{name} {kind}", _instead(kinds[kind], name), _readers(name), either=_told_of(name))


def _edited(name: str, edit: Callable[[bytes], bytes]) -> Damage:
    def change(directory: Path) -> None:
        path = own(directory / name)
        path.write_bytes(edit(path.read_bytes()))

    return change


def _resized(name: str, size: int) -> Damage:
    return lambda directory: os.truncate(own(directory / name), size)


def _size(draw: random.Random, shards: list[str]) -> Kind:
    name = draw.choice([*READ_BY, *shards])
    way = draw.choice(["empty", "cut", "longer", "sparse 300 MB", "sparse 1 TB", "twice"])
    part = draw.random()
    damages: dict[str, Damage] = {
        "empty": _resized(name, 0),
        "cut": _edited(name, lambda data: data[: int(part * (len(data) - 2))]),
        "longer": _edited(name, lambda data: data + b"\0" * (1 + int(part * 200))),
        "sparse 300 MB": _resized(name, 300_000_000),
        "sparse 1 TB": _resized(name, 2**40),
        "twice": _edited(name, lambda data: data + data),
    }
    # A part of a template, or one twice, is a template.
    free = name == TEMPLATE and way in ("cut", "longer", "twice")
    must = None if free else _readers(name)
    return _drawn(f"{name} {way} {part:.3f}", damages[way], must, either=_told_of(name))


def _encoding(draw: random.Random, shards: list[str]) -> Kind:
    name = draw.choice(list(READ_BY))
    place = draw.random()

    def inserted(what: bytes) -> Callable[[bytes], bytes]:
        return lambda data: data[: int(place * len(data))] + what + data[int(place * len(data)) :]

    is_json = name.endswith(".json")
    # Whether it is wrong; None where it may be.
    ways: dict[str, tuple[Callable[[bytes], bytes], bool | None]] = {
        "UTF-16": (lambda data: data.decode().encode("utf-16"), True),
        "UTF-32": (lambda data: data.decode().encode("utf-32"), True),
        "EBCDIC": (lambda data: data.decode().encode("cp500", "replace"), True),
        "a byte that is no UTF-8": (inserted(b"\xff"), True),
        "an overlong form": (inserted(b"\xc0\xaf"), True),
        "lines that end as on Windows": (lambda data: data.replace(b"\n", b"\r\n"), False),
    }
    if is_json:
        ways |= {
            "a byte order mark": (lambda data: b"\xef\xbb\xbf" + data, True),
            "a NUL": (inserted(b"\0"), True),
            "nested 100,000 deep": (lambda data: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", True),
            "a comment": (lambda data: b"// says\n" + data, True),
            "other spaces": (lambda data: json.dumps(json.loads(data), indent=7).encode(), False),
            "escapes": (lambda data: json.dumps(json.loads(data), ensure_ascii=True).encode(), False),
            "half a surrogate as a name": (lambda data: b'{"\\ud800": 1,' + data.lstrip()[1:], None),
        }
    way = draw.choice(list(ways))
    edit, refused = ways[way]
    if name == TEMPLATE and way in ("EBCDIC", "lines that end as on Windows"):
        refused = None  # text of a template, which reaches the prompt
    must = None if refused is None else _readers(name) if refused else ""
    return _drawn(f"{name} {way} {place:.3f}", _edited(name, edit), must, either=_told_of(name))


NUMBERS: list[Any] = [
    math.nan, math.inf, -math.inf, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, 1e308, -1e308, 1e-300, 5e-324, -0.0, 0.5,
    "1", "", True, None, [1], {"a": 1}, "²", "0x10", "1e3",
]  # fmt: skip


def _number(draw: random.Random, shards: list[str]) -> Kind:
    """A number of a JSON file or a header becomes another thing; whether that is wrong depends on which it is."""
    name = draw.choice([CONFIG, CONFIG, CONFIG, INDEX, GENERATION, TOKENIZER, shards[0], shards[-1]])
    value, at = draw.choice(NUMBERS), draw.random()

    def change(raw: Any) -> None:
        found: list[tuple[Any, Any]] = []
        waiting = [raw]
        while waiting:
            one = waiting.pop()
            for key, below in one.items() if isinstance(one, dict) else enumerate(one):
                if isinstance(below, (dict, list)):
                    waiting.append(below)
                elif isinstance(below, (int, float)) and not isinstance(below, bool):
                    found.append((one, key))
        if found:
            holder, key = found[int(at * len(found))]
            holder[key] = value

    def in_json(directory: Path) -> None:
        path = own(directory / name)
        raw = json.loads(path.read_text())
        change(raw)
        path.write_text(json.dumps(raw))

    damage = header(change, name) if name in shards else in_json
    return _drawn(f"{name} {at:.4f}: {str(value)[:20]!r}", damage, None)


def _reference(draw: random.Random, shards: list[str]) -> Kind:
    """A name that leads elsewhere."""
    wrong: list[Any] = [
        "model-²-of-3.safetensors", "model-٣-of-3.safetensors", "../model.safetensors", "/dev/zero", "./" + shards[0],
        shards[0].upper(), shards[0] + "\0", "", ".", "..", "con.safetensors", "model-9-of-9.safetensors",
        "tiktoken.model", "a/b.safetensors", "é" * 200 + ".safetensors", "\ud800.safetensors", 3, None, [shards[0]],
        "https://huggingface.co/x.safetensors", "model-1-of-3.safetensors.partial", "-.safetensors", "*.safetensors",
    ]  # fmt: skip
    to, at = draw.choice(wrong), draw.random()
    way = draw.choice(["a shard's name", "a shard's name", "another shard", "a tensor's name", "shards exchanged"])

    def in_index(edit: Callable[[dict[str, Any], str], object]) -> Damage:
        def change(directory: Path) -> None:
            path = own(directory / INDEX)
            raw = json.loads(path.read_text())
            names = sorted(raw["weight_map"])
            edit(raw["weight_map"], names[int(at * len(names))])
            path.write_text(json.dumps(raw))

        return change

    def exchanged(directory: Path) -> None:
        first, second = directory / shards[0], directory / shards[-1]
        first.rename(directory / "held")
        second.rename(first)
        (directory / "held").rename(second)

    def elsewhere(weight_map: dict[str, Any], name: str) -> None:
        weight_map[name] = next(shard for shard in shards if shard != weight_map[name])

    ways: dict[str, tuple[Damage, str | None]] = {
        "a shard's name": (in_index(lambda names, one: names.update({one: to})), WEIGHTS),
        "another shard": (in_index(elsewhere), WEIGHTS),
        "a tensor's name": (in_index(lambda names, one: names.update({f"{one}.x": names.pop(one)})), WEIGHTS),
        "shards exchanged": (exchanged, WEIGHTS),
    }
    damage, refused = ways[way]
    # The plan counts the shards that the index names, there or not.
    return _drawn(f"{way} {at:.3f} {to!r}"[:80], damage, refused, either="p")


def _concurrency(draw: random.Random, shards: list[str]) -> Kind:
    """Another process at work; either end is right, but for a wrong one."""
    name = draw.choice([CONFIG, INDEX, VOCABULARY, *shards, *shards])
    way = draw.choice(
        ["removed", "replaced by a shorter one", "replaced by a pipe", "longer", "made anew", "unreadable"]
    )

    def replaced(directory: Path, content: Callable[[Path, Path], object]) -> None:
        (directory / "new").unlink(missing_ok=True)
        content(directory / name, directory / "new")
        (directory / "new").replace(directory / name)

    def shorter(old: Path, new: Path) -> None:
        new.write_bytes(old.read_bytes()[:-100])

    meanwhile: dict[str, Damage] = {
        "removed": lambda directory: (directory / name).unlink(missing_ok=True),
        "replaced by a shorter one": lambda directory: replaced(directory, shorter),
        "replaced by a pipe": lambda directory: replaced(directory, lambda old, new: os.mkfifo(new)),
        "longer": lambda directory: own(directory / name).open("ab").write(b"\0" * 100),
        "made anew": lambda directory: replaced(directory, shutil.copyfile),
        "unreadable": lambda directory: own(directory / name).chmod(0),
    }
    way = draw.choice(list(meanwhile))
    return _drawn(f"{name} {way}", lambda directory: None, None, meanwhile=meanwhile[way])


JUNK: list[Any] = [
    None, True, -1, 0, 3, 2**63, 10**40, 0.5, -0.0, float("nan"), float("inf"), "", "x", "768", [], [[]], {}, {"a": []},
    "\0", "é" * 300, [0] * 1000, "model-1-of-3.safetensors",
]  # fmt: skip
_JSON = (CONFIG, INDEX, TOKENIZER, GENERATION)


def _anything(draw: random.Random, shards: list[str]) -> Kind:
    """Bytes anywhere, or a member of JSON or of a header at a drawn depth."""
    shard, seed = draw.choice(shards), draw.random()
    name = draw.choice([*_JSON, CONFIG, VOCABULARY, TEMPLATE, shard, shard, shard])

    def damage(directory: Path) -> None:
        draw = random.Random(seed)
        if name == shard and draw.random() < 0.6:
            header(lambda entries: _anywhere(entries, draw), shard)(directory)
        elif name in _JSON and draw.random() < 0.8:
            path = own(directory / name)
            raw = json.loads(path.read_text())
            _anywhere(raw, draw)
            path.write_text(json.dumps(raw))
        else:
            _bytes(own(directory / name), draw)

    return _drawn(f"{name} {seed:.4f}", damage, None)


def _anywhere(raw: Any, draw: random.Random) -> None:
    """Replace, remove, rename or double something at a drawn depth."""
    holder = raw
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = draw.choice(keys)
        below = holder[key]
        if not (isinstance(below, (dict, list)) and below and draw.random() < 0.8):
            break
        holder = below
    way = draw.choice(["junk", "junk", "junk", "remove", "rename", "like"])
    if way == "remove":
        del holder[key]
    elif way == "rename" and isinstance(holder, dict):
        holder[str(draw.choice(JUNK))[:40]] = holder.pop(key)
    elif way == "like" and isinstance(holder[key], (int, float)):
        holder[key] = holder[key] * draw.choice([-1, 2, 1.5, 1000]) + draw.choice([0, 1])
    else:
        holder[key] = draw.choice(JUNK)


def _bytes(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data) if draw.random() < 0.5 else min(len(data), 4000))
    size = min(draw.choice([1, 1, 8, 100, 5000]), len(data) - start)
    way = draw.choice(["flip", "zero", "remove", "insert", "cut", "random"])
    if way == "flip":
        data[start] ^= 1 << draw.randrange(8)
    elif way == "zero":
        data[start : start + size] = bytes(size)
    elif way == "remove":
        del data[start : start + size]
    elif way == "insert":
        data[start:start] = draw.randbytes(size)
    elif way == "cut":
        del data[start:]
    else:
        data[start : start + size] = draw.randbytes(size)
    path.write_bytes(data)


_MAKERS: dict[str, Callable[[random.Random, list[str]], Kind]] = {
    "file type": _file_type, "size": _size, "encoding": _encoding, "number": _number, "reference": _reference,
    "concurrency": _concurrency, "anything": _anything,
}  # fmt: skip
MECHANISMS = tuple(_MAKERS)
