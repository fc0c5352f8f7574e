"""Drawn damage: of an even seed a member of a file's JSON or header, of an odd one bytes anywhere."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from damage import CONFIG, INDEX, Kind, edited, header, rewritten

FILES = (CONFIG, INDEX, "tokenizer_config.json", "generation_config.json")
OTHERS = ("tiktoken.model", "chat_template.jinja")


def drawn(seed: int, directory: Path) -> Kind:
    """The fault of a seed, for a checkpoint that is like the one in `directory`: a member, or bytes."""
    draw, shards = random.Random(seed), sorted(path.name for path in directory.glob("*.safetensors"))
    name = draw.choice([*FILES, *OTHERS, *shards] if seed % 2 else [*FILES, CONFIG, INDEX, shards[0], shards[-1]])

    def edit(raw: Any) -> None:
        _anywhere(raw, random.Random(seed))

    member = header(edit, name) if name in shards else rewritten(name, edit)
    damage = edited(name, lambda data: _scribbled(data, random.Random(seed))) if seed % 2 else member
    return Kind(f"{name} {seed}", "", damage, "", None)


JUNK: list[Any] = [
    None, True, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**40, 10**400, 0.5, -0.0, 1e308, -1e308, 1e-300, 5e-324,
    float("nan"), float("inf"), -float("inf"), "", "x", "1", "768", "²", "0x10", "1e3", [], [1], [[]], {}, {"a": []},
    "\0", "é" * 300, [0] * 1000, "model-1-of-3.safetensors", "model-9-of-9.safetensors", "model-²-of-3.safetensors",
    "../model.safetensors", "/dev/zero", ".", "..", "a/b.safetensors", "\ud800.safetensors", "*.safetensors",
    "https://huggingface.co/x.safetensors", "model-1-of-3.safetensors.partial", "tiktoken.model",
]  # fmt: skip


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


def _scribbled(content: bytes, draw: random.Random) -> bytes:
    """Bytes anywhere replaced, removed, or all behind them."""
    data = bytearray(content)
    start = draw.randrange(len(data) if draw.random() < 0.5 else min(len(data), 4000))
    size = min(draw.choice([1, 1, 8, 100, 5000]), len(data) - start)
    put = draw.choice([bytes([data[start] ^ 1 << draw.randrange(8)]), bytes(size), b"", draw.randbytes(size)])
    data[start : draw.choice([start, start + len(put), start + size, len(data)])] = put
    return bytes(data)
