"""A module's source, cut into definitions, with the global names that each of them uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Use(NamedTuple):
    """A global name in a piece of source: where it stands, and what it is called there."""

    start: int
    end: int
    name: str
    attribute: str | None  # of a module: the `name` of `module.name`
    typing: bool


@dataclass
class Piece:
    """A definition, a part of a class, or what stands between definitions."""

    start: int
    end: int
    uses: list[Use]
    names: list[str] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    members: dict[str, Piece] = field(default_factory=dict)
    dropped: list[tuple[int, int]] = field(default_factory=list)  # imports inside functions
    called: bool = False  # by others
    plain: bool = False  # an assignment


class Module:
    """A module's source, cut into pieces.

    Args:
        name: of the module.
        source: its text.
        is_inner: whether a module is one of those that are bundled.
    """

    def __init__(self, name: str, source: str, is_inner: Callable[[str], bool], *, package: str) -> None:
        self.name, self.source, self.package = name, source.encode(), package
        self.is_inner = is_inner
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.inner: dict[str, tuple[str, str | None]] = {}  # local name: module, and what of it
        self.outer: dict[str, str] = {}  # local name: import statement
        self.pieces: list[Piece] = []
        self.defined: dict[str, Piece] = {}
        self.depends: list[str] = []
        for node in ast.parse(source).body:
            self._top(node)

    # -- cutting -------------------------------------------------------------------------------------

    def _top(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self.take_import(node, self.depends)
            return
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for one in node.body:
                assert isinstance(one, (ast.Import, ast.ImportFrom))
                self.take_import(one, [])
            return
        piece = self._piece(node)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            piece.names = [node.name]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            piece.plain = True
            piece.names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        if isinstance(node, ast.ClassDef):
            self._members(node, piece)
        self.pieces.append(piece)
        self.defined.update(dict.fromkeys(piece.names, piece))

    def _members(self, node: ast.ClassDef, piece: Piece) -> None:
        """Methods become pieces of their own; everything else of the class stays in its piece."""
        inside = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        for one in inside:
            known = piece.members.get(one.name)
            member = self._piece(one)
            if known is not None:  # a property and its setter
                member.start, member.uses = known.start, known.uses + member.uses
                member.attributes |= known.attributes
            validated = {ast.unparse(mark).partition("(")[0] for mark in one.decorator_list}
            if validated & {"model_validator", "field_validator", "model_serializer"}:
                member.called = True  # pydantic calls it
            piece.members[one.name] = member
        spans = [(one.start, one.end) for one in piece.members.values()]
        piece.uses = [use for use in piece.uses if not any(start <= use.start < end for start, end in spans)]
        piece.attributes = {
            one.attr
            for part in (*node.decorator_list, *node.bases, *(one for one in node.body if one not in inside))
            for one in ast.walk(part)
            if isinstance(one, ast.Attribute)
        }

    def take_import(self, node: ast.Import | ast.ImportFrom, depends: list[str]) -> None:
        """Note what an import binds; bundled modules go to `depends`."""
        if isinstance(node, ast.Import):
            for one in node.names:
                local = one.asname or one.name.partition(".")[0]
                self.outer[local] = f"import {one.name}" + (f" as {one.asname}" if one.asname else "")
            return
        base = node.module or ""
        if node.level:
            base = ".".join(filter(None, [self.package, base]))
        for one in node.names:
            local = one.asname or one.name
            if self.is_inner(f"{base}.{one.name}"):
                self.inner[local] = f"{base}.{one.name}", None
                depends.append(f"{base}.{one.name}")
            elif self.is_inner(base):
                self.inner[local] = base, one.name
                depends.append(base)
            elif base != "__future__":
                self.outer[local] = f"from {base} import {one.name}" + (f" as {one.asname}" if one.asname else "")

    def _piece(self, node: ast.stmt) -> Piece:
        marks = getattr(node, "decorator_list", ())
        first = min([node, *marks], key=lambda one: one.lineno)
        line = first.lineno - 1
        while line and self.source[self.starts[line - 1] : self.starts[line]].lstrip().startswith(b"#"):
            line -= 1
        assert node.end_lineno is not None
        end = node.end_lineno
        if self.source[self.starts[end] :].startswith(b"# fmt: on"):
            end += 1
        piece = Piece(self.starts[line], self.starts[end], [])
        _Walk(self, piece).visit(node)
        return piece

    def place(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Bytes of a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset


class _Walk(ast.NodeVisitor):
    """Collects the global names that a piece uses, with what functions bind taken out."""

    def __init__(self, module: Module, piece: Piece) -> None:
        self.module, self.piece = module, piece
        self.bound: list[set[str]] = []
        self.typing = False

    def _annotation(self, node: ast.expr | None) -> None:
        if node is not None:
            kept, self.typing = self.typing, True
            self.visit(node)
            self.typing = kept

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for mark in node.decorator_list:
            self.visit(mark)
        args = node.args
        for default in (*args.defaults, *filter(None, args.kw_defaults)):
            self.visit(default)
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
        for one in every:
            self._annotation(one.annotation)
        self._annotation(node.returns)
        self.bound.append({one.arg for one in every} | set(_bound(node.body)))
        for statement in node.body:
            self.visit(statement)
        self.bound.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        args = node.args
        for default in (*args.defaults, *filter(None, args.kw_defaults)):
            self.visit(default)
        every = [*args.posonlyargs, *args.args, *args.kwonlyargs, *filter(None, (args.vararg, args.kwarg))]
        self.bound.append({one.arg for one in every})
        self.visit(node.body)
        self.bound.pop()

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> None:
        targets = (one for part in node.generators for one in ast.walk(part.target) if isinstance(one, ast.Name))
        self.bound.append({one.id for one in targets})
        self.generic_visit(node)
        self.bound.pop()

    visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _comprehension  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.visit(node.target)
        # Of a class's own fields pydantic and dataclasses read what annotations name.
        inside = len(self.bound) > 1 or not isinstance(node.target, ast.Name)
        self._annotation(node.annotation) if inside else self.visit(node.annotation)
        if node.value is not None:
            self.visit(node.value)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        before = dict(self.module.outer)
        self.module.take_import(node, [])
        if self.module.outer == before:  # of bundled modules: those names are there at the top
            start, end = self.module.place(node)
            self.piece.dropped.append((start, end))
        else:
            self.module.outer = before

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.piece.attributes.add(node.attr)
        value = node.value
        origin = self.module.inner.get(value.id) if isinstance(value, ast.Name) and self._is_global(value.id) else None
        if isinstance(value, ast.Name) and origin is not None and origin[1] is None:
            start, end = self.module.place(node)
            self.piece.uses.append(Use(start, end, value.id, node.attr, self.typing))
            return
        self.visit(value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Python 3.11 gives no places in f-strings: the text is looked through for the names that are used."""
        names = Piece(0, 0, [])
        inner = _Walk(self.module, names)
        inner.bound, inner.typing = self.bound, self.typing
        inner.generic_visit(node)
        self.piece.attributes |= names.attributes
        start, end = self.module.place(node)
        text = self.module.source[start:end].decode()
        for use in names.uses:
            written = use.name if use.attribute is None else f"{use.name}.{use.attribute}"
            for braces in re.finditer(r"\{[^{}]*\}", text):
                for match in re.finditer(rf"(?<![\w.]){re.escape(written)}(?!\w)", braces.group()):
                    at = start + len(text[: braces.start() + match.start()].encode())
                    one = Use(at, at + len(written.encode()), use.name, use.attribute, use.typing)
                    if one not in self.piece.uses:
                        self.piece.uses.append(one)

    def visit_Name(self, node: ast.Name) -> None:
        if self._is_global(node.id):
            start, end = self.module.place(node)
            self.piece.uses.append(Use(start, end, node.id, None, self.typing))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        start, _ = self.module.place(node)
        at = self.module.source.index(node.name.encode(), start)
        if not self.bound:
            self.piece.uses.append(Use(at, at + len(node.name.encode()), node.name, None, False))
        for part in (*node.decorator_list, *node.bases, *(one.value for one in node.keywords)):
            self.visit(part)
        self.bound.append(set(_bound(node.body)))
        for statement in node.body:
            self.visit(statement)
        self.bound.pop()

    def _is_global(self, name: str) -> bool:
        return not any(name in scope for scope in self.bound)


def _bound(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Names that a function's statements bind."""
    for statement in body:
        stack: list[ast.AST] = [statement]
        while stack:
            node = stack.pop()
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                yield node.name
                continue
            if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
                continue
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            if isinstance(node, ast.ExceptHandler) and node.name:
                yield node.name
            stack += ast.iter_child_nodes(node)
