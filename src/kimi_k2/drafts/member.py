"""Whether a head was trained for another member of the family, whose shapes are the same, as its metadata says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from kimi_k2.errors import ConfigError
from kimi_k2.files import read_json, read_text

_MEMBER = re.compile(r"kimi[._-]?k2(?:[._p-]?(?P<number>[5-9])(?!\d))?(?:[._-](?P<kind>thinking|instruct|base))?")
_README = "README.md"
_README_BYTES = 2**20


def member(name: str) -> str | None:
    """`k2`, `k2-thinking`, `k2.5` ... of a name such as `moonshotai/Kimi-K2.5`; None if it names none."""
    found = _MEMBER.search(name.lower())
    if found is None:
        return None
    if found["number"]:
        return f"k2.{found['number']}"
    return "k2-thinking" if "thinking" in name.lower() else "k2"


def other_member(head: Path, target: Path) -> str | None:
    """In a few words, which member a head names and which one the target is; None where they agree or say nothing.

    A head's README names its `base_model` in the front matter, as Hugging Face has it; else its directory's name
    counts. A target is what its config.json or its directory says.
    """
    own = next((one for one in map(member, [*_base_models(head), *_names(head)]) if one), None)
    theirs = next((one for one in map(member, _names(target)) if one), None)
    if own is None or theirs is None or own == theirs:
        return None
    return f"a head for {own}, and the target is {theirs}"


def _base_models(head: Path) -> list[str]:
    path = head / _README
    if not path.is_file():
        return []
    parts = read_text(path, _README_BYTES, ConfigError).split("---", 2)
    try:
        held: Any = yaml.safe_load(parts[1]) if len(parts) == 3 and not parts[0].strip() else None
    except yaml.YAMLError:
        return []
    given = held.get("base_model") if isinstance(held, dict) else None
    return [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)]


def _names(directory: Path) -> list[str]:
    """Of config.json, of the directory, and of the repository where it lies in a Hugging Face cache."""
    config = directory / "config.json"
    held = read_json(config, ConfigError) if config.is_file() else {}
    given = held.get("_name_or_path") if isinstance(held, dict) else None
    names = [given.rstrip("/").rpartition("/")[2]] if isinstance(given, str) else []
    parts = directory.resolve().parts
    return [*names, parts[-1], *(parts[-3:-2] if "snapshots" in parts[-2:-1] else ())]
