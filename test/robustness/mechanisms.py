"""Drawn damage by mechanism: a member of a file's JSON or header, or bytes anywhere.

A seed draws one checkpoint's fault together with what each command must make of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from damage import CONFIG, INDEX, Kind, header, own, rewritten

FILES = (CONFIG, INDEX, "tokenizer_config.json", "generation_config.json")
OTHERS = ("tiktoken.model", "chat_template.jinja")


def drawn(seed: int, directory: Path) -> Kind:
    """The fault of a seed, for a checkpoint that is like the one in `directory`."""
    mechanism = MECHANISMS[seed % len(MECHANISMS)]
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    kind = _MAKERS[mechanism](random.Random(seed), shards)
    return replace(kind, name=f"{mechanism}: {kind.name}")


JUNK: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**40, 10**400, 0.5, -0.0, 1e308, -1e308, 1e-300, 5e-324,
    float("nan"), float("inf"), -float("inf"), "", "x", "1", "768", "²", "0x10", "1e3", [], [1], [[]], {}, {"a": []},
    "\0", "é" * 300, [0] * 1000, "model-1-of-3.safetensors", "model-9-of-9.safetensors", "model-²-of-3.safetensors",
    "../model.safetensors", "/dev/zero", ".", "..", "a/b.safetensors", "\ud800.safetensors", "*.safetensors",
    "https://huggingface.co/x.safetensors", "model-1-of-3.safetensors.partial", "tiktoken.model",
]  # fmt: skip


def _member(draw: random.Random, shards: list[str]) -> Kind:
    """A member of JSON or of a header at a drawn depth; whether that is wrong depends on which it is."""
    name, seed = draw.choice([*FILES, CONFIG, INDEX, shards[0], shards[-1]]), draw.random()

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
    name, seed = draw.choice([*FILES, *OTHERS, *shards]), draw.random()

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


_MAKERS: dict[str, Callable[[random.Random, list[str]], Kind]] = {"member": _member, "bytes": _bytes}
MECHANISMS = tuple(_MAKERS)
