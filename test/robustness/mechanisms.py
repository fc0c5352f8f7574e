"""Drawn damage by mechanism: what a file is and what bytes it has, a member of its JSON or header, or bytes anywhere.

A seed draws one checkpoint's fault together with what each command must make of it.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from damage import CONFIG, INDEX, Kind, header, own, rewritten

VOCABULARY, TOKENIZER = "tiktoken.model", "tokenizer_config.json"
TEMPLATE, GENERATION = "chat_template.jinja", "generation_config.json"
# Which commands read a file, by first letter.
WEIGHTS, TEXT = "icgda", "gd"
READ_BY = {CONFIG: "ipcgda", INDEX: "ipcgda", VOCABULARY: TEXT, TOKENIZER: TEXT, TEMPLATE: TEXT, GENERATION: TEXT}
_JSON = (CONFIG, INDEX, TOKENIZER, GENERATION)


def drawn(seed: int, directory: Path) -> Kind:
    """The fault of a seed, for a checkpoint that is like the one in `directory`."""
    mechanism = MECHANISMS[seed % len(MECHANISMS)]
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    kind = _MAKERS[mechanism](random.Random(seed), shards)
    return replace(kind, name=f"{mechanism}: {kind.name}")


def _bound(path: Path) -> None:
    # A socket's name has at most 108 bytes.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(before)


# What lies in a file's place; also what another process puts there while a command runs.
_PLACED: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a socket": _bound,
    "a directory": Path.mkdir,
    "a link to its directory": lambda path: path.symlink_to("."),
    "nothing to be read": lambda path: path.touch(0),
}
_LINKS = (
    *("nothing", "/dev/zero", "/dev/urandom", "/dev/full", "/dev/null", "/dev/tty", "/proc/kmsg", "/proc/self/mem"),
    *("/proc/kcore", "/proc/self/environ", "/sys/power/state"),
)
_SIZES = {"empty": 0, "sparse 300 MB": 300_000_000, "sparse 1 TB": 2**40}
# A file's bytes and a drawn part of them to others; whether they are wrong of JSON, of other text, and of a shard.
_EDITS: dict[str, tuple[Callable[[bytes, float], bytes], tuple[bool | None, bool | None, bool | None]]] = {
    "cut": (lambda data, part: data[: int(part * (len(data) - 2))], (True, True, True)),
    "longer": (lambda data, part: data + b"\0" * (1 + int(part * 200)), (True, True, True)),
    "twice": (lambda data, part: data + data, (True, True, True)),
    "UTF-16": (lambda data, part: data.decode("latin-1").encode("utf-16"), (True, True, True)),
    "EBCDIC": (lambda data, part: data.decode("latin-1").encode("cp500", "replace"), (True, True, True)),
    "no UTF-8": (lambda data, part: _inserted(data, part, b"\xff"), (True, True, None)),
    "an overlong form": (lambda data, part: _inserted(data, part, b"\xc0\xaf"), (True, True, None)),
    "a NUL": (lambda data, part: _inserted(data, part, b"\0"), (True, None, None)),
    "a byte order mark": (lambda data, part: b"\xef\xbb\xbf" + data, (True, None, True)),
    "a comment": (lambda data, part: b"// says\n" + data, (True, None, True)),
    "nested": (lambda data, part: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", (True, None, True)),
    "half a surrogate": (lambda data, part: b'{"\\ud800": 1,' + data.lstrip()[1:], (None, None, True)),
    "lines as on Windows": (lambda data, part: data.replace(b"\n", b"\r\n"), (False, None, None)),
}


def _inserted(data: bytes, part: float, what: bytes) -> bytes:
    place = int(part * len(data))
    return data[:place] + what + data[place:]


def _file(draw: random.Random, shards: list[str]) -> Kind:
    """What a file is, its size or its encoding."""
    name, part = draw.choice([*READ_BY, *shards]), draw.random()
    readers = READ_BY.get(name, WEIGHTS)
    way = draw.choice([*_PLACED, *_LINKS, name, *_SIZES, *_EDITS, *_EDITS])
    wrong: bool | None = True

    def damage(directory: Path) -> None:
        path = own(directory / name)
        if way in _EDITS:
            path.write_bytes(_EDITS[way][0](path.read_bytes(), part))
        elif way in _SIZES:
            os.truncate(path, _SIZES[way])
        else:
            path.unlink()
            make = _PLACED.get(way)
            make(path) if make else path.symlink_to(way)

    if way in _EDITS:
        of_json, of_text, of_shard = _EDITS[way][1]
        wrong = of_json if name in _JSON else of_shard if name in shards else of_text
        wrong = None if name == TEMPLATE and way in ("cut", "longer", "twice", "EBCDIC") else wrong
    if way == "nothing to be read" and os.geteuid() == 0:
        wrong = None if name in (TEMPLATE, VOCABULARY) else True  # of root it is an empty file
    must = None if wrong is None else readers if wrong else ""
    # A template that cannot be rendered ends no chat: its error answers the message.
    return Kind(f"{name} {way} {part:.3f}", "", damage, "", must, either="d" if name == TEMPLATE else "")


JUNK: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**40, 10**400, 0.5, -0.0, 1e308, -1e308, 1e-300, 5e-324,
    float("nan"), float("inf"), -float("inf"), "", "x", "1", "768", "²", "0x10", "1e3", [], [1], [[]], {}, {"a": []},
    "\0", "é" * 300, [0] * 1000, "model-1-of-3.safetensors", "model-9-of-9.safetensors", "model-²-of-3.safetensors",
    "../model.safetensors", "/dev/zero", ".", "..", "a/b.safetensors", "\ud800.safetensors", "*.safetensors",
    "https://huggingface.co/x.safetensors", "model-1-of-3.safetensors.partial", "tiktoken.model",
]  # fmt: skip


def _member(draw: random.Random, shards: list[str]) -> Kind:
    """A member of JSON or of a header at a drawn depth; whether that is wrong depends on which it is."""
    name, seed = draw.choice([*_JSON, CONFIG, INDEX, shards[0], shards[-1]]), draw.random()

    def edit(raw: Any) -> None:
        _anywhere(raw, random.Random(seed))

    damage = header(edit, name) if name in shards else rewritten(name, edit)
    return Kind(f"{name} {seed:.4f}", "", damage, "", None)


def _anywhere(raw: Any, draw: random.Random) -> None:
    """Replace, remove, rename, double or exchange something at a drawn depth."""
    holder = raw
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key, other = draw.choice(keys), draw.choice(keys)
        below = holder[key]
        if not (isinstance(below, (dict, list)) and below and draw.random() < 0.8):
            break
        holder = below
    way = draw.choice(["junk", "junk", "junk", "remove", "rename", "like", "exchange"])
    if way == "remove":
        del holder[key]
    elif way == "rename" and isinstance(holder, dict):
        holder[str(draw.choice(JUNK))[:40]] = holder.pop(key)
    elif way == "like" and isinstance(holder[key], (int, float)):
        holder[key] = holder[key] * draw.choice([-1, 2, 1.5, 1000]) + draw.choice([0, 1])
    elif way == "exchange":
        holder[key], holder[other] = holder[other], holder[key]
    else:
        holder[key] = draw.choice(JUNK)


def _bytes(draw: random.Random, shards: list[str]) -> Kind:
    """Bytes anywhere in a file."""
    name, seed = draw.choice([*READ_BY, *shards]), draw.random()

    def damage(directory: Path) -> None:
        path, draw = own(directory / name), random.Random(seed)
        data = bytearray(path.read_bytes())
        start = draw.randrange(len(data) if draw.random() < 0.5 else min(len(data), 4000))
        size = min(draw.choice([1, 1, 8, 100, 5000]), len(data) - start)
        put = draw.choice([bytes([data[start] ^ 1 << draw.randrange(8)]), bytes(size), b"", draw.randbytes(size)])
        end = draw.choice([start, start + len(put), start + size, len(data)])
        data[start:end] = put
        path.write_bytes(data)

    return Kind(f"{name} {seed:.4f}", "", damage, "", None)


_MAKERS: dict[str, Callable[[random.Random, list[str]], Kind]] = {"file": _file, "member": _member, "bytes": _bytes}
MECHANISMS = tuple(_MAKERS)
