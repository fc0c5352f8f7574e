"""Drawn damage: a seed chooses a file of a checkpoint and what happens to its bytes or its JSON."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from damage import header, own

JUNK: list[Any] = [
    None, True, -1, 0, 3, 2**63, 10**40, 0.5, -0.0, float("nan"), float("inf"), "", "x", "768", [], [[]], {}, {"a": []},
    "\0", "é" * 300, [0] * 1000, "model-1-of-3.safetensors",
]  # fmt: skip
_JSON = ("config.json", "model.safetensors.index.json", "tokenizer_config.json", "generation_config.json")


def mutate(directory: Path, seed: int) -> str:
    """Damage a private copy; says what was done."""
    draw = random.Random(seed)
    shard = draw.choice(sorted(path.name for path in directory.glob("*.safetensors")))
    name = draw.choice([*_JSON, "config.json", "tiktoken.model", "chat_template.jinja", shard, shard, shard])
    if name == shard and draw.random() < 0.6:
        said: list[str] = []
        header(lambda entries: said.append(_anywhere(entries, draw)), shard)(directory)
        return f"header of {shard}: {said[0]}"
    if name in _JSON and draw.random() < 0.8:
        path = own(directory / name)
        raw = json.loads(path.read_text())
        done = _anywhere(raw, draw)
        path.write_text(json.dumps(raw))
        return f"{name}: {done}"
    return f"{name}: {_bytes(own(directory / name), draw)}"


def _anywhere(raw: Any, draw: random.Random) -> str:
    """Replace, remove, rename or double something at a drawn depth."""
    place, holder = [], raw
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = draw.choice(keys)
        place.append(str(key)[-60:])
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
        way = repr(draw.choice(JUNK))[:30]
        holder[key] = draw.choice(JUNK)
    return f"{'/'.join(place)}: {way}"


def _bytes(path: Path, draw: random.Random) -> str:
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
    return f"{way} {size} bytes at {start}"
