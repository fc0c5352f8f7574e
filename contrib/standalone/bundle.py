"""Modules of several packages as a few files: what their roots reach, and nothing else.

Definitions are followed one by one, methods too; comments and docstrings stay. Names that two modules have get the
module's name behind them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from .module import Module, Piece


class Reference(NamedTuple):
    """A definition: its module, and its name there."""

    module: str
    name: str


class Bundle:
    """What `roots` reach of some modules.

    Args:
        modules: by name.
        roots: definitions that are wanted.
        files: modules of each file.
        subclassed: modules whose classes override what others call: all their methods stay.

    Raises:
        ValueError: a name that is used is nowhere, or files need each other.
    """

    def __init__(
        self,
        modules: Mapping[str, Module],
        roots: Iterable[Reference],
        files: Mapping[str, Sequence[str]],
        subclassed: Collection[str] = (),
    ) -> None:
        self.modules, self.files, self.subclassed = modules, files, subclassed
        self.file_of = {module: file for file, names in files.items() for module in names}
        self.kept: dict[str, set[int]] = defaultdict(set)  # pieces by module
        self.members: set[tuple[str, str, str]] = set()
        self._attributes: set[str] = set()
        self._classes: list[tuple[str, Piece]] = []
        self._queue = list(roots)
        self._reach()
        self.renamed = self._renames()

    # -- reaching ------------------------------------------------------------------------------------

    def resolve(self, module: str, name: str, attribute: str | None = None) -> Reference | None:
        """Where a name of a module is defined; None if that is no bundled module."""
        parsed = self.modules[module]
        if name in parsed.defined:
            return Reference(module, name)
        if name not in parsed.inner:
            return None
        owner, what = parsed.inner[name]
        if what is None:
            what = attribute
        if what is None:
            raise ValueError(f"{module}: the module {name} is handed on as a value")
        if owner not in self.modules:
            raise ValueError(f"{module} needs {owner}.{what}, which belongs to no file")
        reference = self.resolve(owner, what)
        if reference is None:
            raise ValueError(f"{module}: {owner} has no {what}")
        return reference

    def _reach(self) -> None:
        while True:
            while self._queue:
                self._take(self._queue.pop())
            if not self._more_members():
                return

    def _take(self, reference: Reference) -> None:
        module = self.modules[reference.module]
        if reference.module not in self.file_of:
            raise ValueError(f"{reference.module}.{reference.name} is reached, and belongs to no file")
        piece = module.defined.get(reference.name)
        if piece is None:
            raise ValueError(f"{reference.module} has no {reference.name}")
        if piece.start in self.kept[reference.module]:
            return
        self.kept[reference.module].add(piece.start)
        self._follow(reference.module, piece)
        if piece.members:
            self._classes.append((reference.module, piece))

    def _follow(self, module: str, piece: Piece) -> None:
        self._attributes |= piece.attributes
        for use in piece.uses:
            reference = self.resolve(module, use.name, use.attribute)
            if reference is not None:
                self._queue.append(reference)

    def _more_members(self) -> bool:
        more = False
        for module, piece in self._classes:
            owner = piece.names[0]
            for name, member in piece.members.items():
                key = (module, owner, name)
                special = name.startswith("__") and name.endswith("__")
                if key in self.members:
                    continue
                if special or member.called or name in self._attributes or module in self.subclassed:
                    self.members.add(key)
                    self._follow(module, member)
                    more = True
        return more or bool(self._queue)

    # -- names ---------------------------------------------------------------------------------------

    def _renames(self) -> dict[Reference, str]:
        count: Counter[str] = Counter()
        everything = [
            Reference(module, name)
            for module, starts in self.kept.items()
            for name, piece in self.modules[module].defined.items()
            if piece.start in starts
        ]
        count.update(one.name for one in everything)
        outer = {name for module in self.kept for name in self.modules[module].outer}
        renamed = {}
        for one in everything:
            if count[one.name] > 1 or one.name in outer:
                stem = one.module.rpartition(".")[2]
                renamed[one] = f"{one.name}_{stem.upper() if one.name.isupper() else stem}"
        return renamed

    def name(self, reference: Reference) -> str:
        """What a definition is called in the bundle."""
        return self.renamed.get(reference, reference.name)

    # -- writing -------------------------------------------------------------------------------------

    def text(self, file: str, docstring: str) -> str:
        """A file's source; not yet formatted."""
        parts: list[str] = []
        plain = False
        outer: dict[str, str] = {}
        inner: dict[tuple[str, str], bool] = {}  # file and name: for annotations alone
        for module in self._in_order(file):
            for piece in self.modules[module].pieces:
                if piece.start in self.kept[module]:
                    text = self._piece(file, module, piece, outer, inner)
                    # Assignments below one another need no lines between them.
                    parts.append(text if plain and piece.plain else "\n" + text)
                    plain = piece.plain
        lines = [f'"""{docstring}"""', "", "from __future__ import annotations", ""]
        lines += sorted(set(outer.values()))
        typing = [(*key,) for key, alone in sorted(inner.items()) if alone and self._is_above(file, key[0])]
        lines += [
            f"from {_module(other)} import {name}" for other, name in sorted(inner) if (other, name) not in typing
        ]
        if typing:
            lines += ["from typing import TYPE_CHECKING", "if TYPE_CHECKING:"]
            lines += [f"    from {_module(other)} import {name}" for other, name in typing]
        return "\n".join([*lines, "", ""]) + "".join(parts)

    def _is_above(self, file: str, other: str) -> bool:
        order = list(self.files)
        return order.index(other) > order.index(file)

    def _in_order(self, file: str) -> list[str]:
        """Modules of a file, each behind those that it imports."""
        order: list[str] = []

        def visit(module: str) -> None:
            if module in order or self.file_of.get(module) != file:
                return
            for other in self.modules[module].depends:
                if other != module:
                    visit(other)
            order.append(module)

        for module in self.files[file]:
            visit(module)
        return order

    def _piece(
        self, file: str, module: str, piece: Piece, outer: dict[str, str], inner: dict[tuple[str, str], bool]
    ) -> str:
        parsed = self.modules[module]
        edits = [(start, end, "pass") for start, end in piece.dropped]
        uses = list(piece.uses)
        for name, member in piece.members.items():
            if (module, piece.names[0], name) in self.members:
                uses += member.uses
                edits += [(start, end, "") for start, end in member.dropped]
            else:
                edits.append((member.start, member.end, ""))
        gone = [(start, end) for start, end, _ in edits]
        for use in uses:
            if any(start <= use.start < end for start, end in gone):
                continue
            reference = self.resolve(module, use.name, use.attribute)
            if reference is None:
                if use.name in parsed.outer:
                    outer[use.name] = parsed.outer[use.name]
                continue
            name = self.name(reference)
            there = self.file_of[reference.module]
            if there != file:
                inner[there, name] = inner.get((there, name), True) and use.typing
                if not use.typing and self._is_above(file, there):
                    raise ValueError(f"{file} needs {name} of {there}, which comes behind it")
            written = parsed.source[use.start : use.end].decode()
            if written != name:
                edits.append((use.start, use.end, name))
        for name in piece.names:
            new = self.name(Reference(module, name))
            if new != name and not piece.members and b"class " not in parsed.source[piece.start : piece.end][:200]:
                found_at = re.search(
                    rb"(?m)^(?:def )?(" + name.encode() + rb")\b", parsed.source[piece.start : piece.end]
                )
                assert found_at is not None
                at = piece.start + found_at.start(1)
                if not any(start == at for start, _, _ in edits):
                    edits.append((at, at + len(name.encode()), new))
        text, at = [], piece.start
        for start, end, new in sorted(set(edits)):
            text += [parsed.source[at:start].decode(), new]
            at = end
        return "".join([*text, parsed.source[at : piece.end].decode()])


def _module(file: str) -> str:
    return "." if file == "__init__" else f".{file}"
