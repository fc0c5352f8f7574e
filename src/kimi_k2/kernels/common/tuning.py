"""Launch choices that were measured, from JSON files: one format for experts, linears and MLA attention.

A folder `tuning_files` beside an operation's kernels holds a file a shape and device, named
`{key}={value},...,device={device}.json` (spaces of the device's name become underscores). It maps sizes, decimal and
joined by commas, to the fields of a choice. The entry that is nearest at or above the wanted sizes serves, the first
size before the next; above the largest, the largest. `kimi-k2 bench tune` writes them. Where a device has none for a
shape its operation's default serves, never another device's choice, with one warning.
"""

from __future__ import annotations

import functools
import json
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, TypeVar

from kimi_k2.errors import KernelError

ChoiceT = TypeVar("ChoiceT")
Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Files(Generic[ChoiceT]):
    """An operation's tuning files.

    Attributes:
        directory: that holds them.
        keys: names of the shape's parts, in a file name's order; values are words.
        sizes: what an entry's numbers count.
        choice: dataclass of a choice.
    """

    directory: Path
    keys: tuple[str, ...]
    sizes: tuple[str, ...]
    choice: type[ChoiceT]

    def parsed(self, name: str) -> tuple[str, ...] | None:
        """The keys' values and the device of a file name; None if it is none."""
        pattern = ",".join(rf"{key}=(\w+)" for key in self.keys)
        match = re.fullmatch(rf"{pattern},device=([\w.-]+)\.json", name)
        return match and match.groups()

    def name(self, *values: object, device: str) -> str:
        """The one name under which choices for this shape and device are looked up.

        Raises:
            KernelError: a value or the device is no word.
        """
        pairs = zip((*self.keys, "device"), (*values, device.replace(" ", "_")), strict=True)
        name = ",".join(f"{key}={value}" for key, value in pairs) + ".json"
        if self.parsed(name) is None:
            raise KernelError(f"tuning file name {name!r}: expected {','.join(self.keys)},device, each a word")
        return name

    def _checked(self, path: Path) -> None:
        if self.parsed(path.name) is None:
            raise KernelError(f"{path}: file name does not have {','.join(self.keys)},device, each a word")

    def load(self, path: Path) -> dict[Sizes, ChoiceT]:
        """A file's choices by their sizes.

        Raises:
            KernelError: the name breaks the contract, or an entry lacks a field or has an unknown one.
        """
        self._checked(path)
        expected, choices = {field.name for field in fields(self.choice)}, {}  # type: ignore[arg-type]
        for key, entry in json.loads(path.read_text(encoding="utf-8")).items():
            sizes = key.split(",")
            if set(entry) != expected or len(sizes) != len(self.sizes) or not all(map(str.isdecimal, sizes)):
                wanted = f"{','.join(self.sizes)} with {sorted(expected)}"
                raise KernelError(f"{path}: entry {key!r} has {sorted(entry)}, expected {wanted}")
            choices[tuple(map(int, sizes))] = self.choice(**entry)
        return choices

    def save(self, path: Path, choices: Mapping[Sizes, ChoiceT]) -> None:
        """Write a file, smallest sizes first; of neighbours that differ in the last size alone not a choice again."""
        self._checked(path)
        keys = sorted(choices)
        kept = [one for one, above in pairwise(keys) if one[:-1] != above[:-1] or choices[one] != choices[above]]
        entries = {key: asdict(choices[key]) for key in [*kept, *keys[-1:]]}  # type: ignore[call-overload]
        lines = ",\n".join(f' "{",".join(map(str, key))}": {json.dumps(entry)}' for key, entry in entries.items())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")

    def table(self, name: str, borrow: Callable[[str], Path | None] = lambda name: None) -> dict[Sizes, ChoiceT]:
        """A file's choices, or those of the file that `borrow` names, with one warning a process; else none."""
        return _table(self, name, borrow)

    def nearest(self, table: Mapping[Sizes, ChoiceT], *sizes: int) -> ChoiceT | None:
        """The choice at or above these sizes; above the largest, the largest; None of an empty table."""
        above = [key for key in table if all(at >= size for at, size in zip(key, sizes, strict=True))]
        key = min(above, default=max(table, default=None))
        return None if key is None else table[key]


@functools.cache
def _table(files: Files[Any], name: str, borrow: Callable[[str], Path | None]) -> dict[Sizes, Any]:
    path = files.directory / name
    if path.exists():
        return files.load(path)
    near = borrow(name)
    instead = "defaults are used" if near is None else f"those of {near.name} are used"
    warnings.warn(f"no tuned choices {name}: {instead}; kimi-k2 bench tune writes some", stacklevel=4)
    return {} if near is None else files.load(near)
