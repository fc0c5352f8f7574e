"""Source without what never happens in one form of the model: known expressions are put in, and what follows from them.

The rest of the text stays as it is written, with its comments.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_UNKNOWN = object()
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Known:
    """What holds in a module.

    Attributes:
        values: constants by expression, as `ast.unparse` writes it; what assigns to one goes.
        parameters: constants by name of a parameter that no function of the module has, and no call hands on.
        dropped: definitions that go: `name`, or `Class.name`.
        replaced: source by definition.
        reworded: sentences of docstrings and comments, and what they say here.
    """

    values: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    dropped: Sequence[str] = ()
    replaced: Mapping[str, str] = field(default_factory=dict)
    reworded: Mapping[str, str] = field(default_factory=dict)


def fold(source: str, known: Known) -> str:
    """A module's source where `known` holds.

    Raises:
        ValueError: what is to be replaced or reworded is not in the module. Other things may have gone there: where one
            was only renamed, what it kept out is reached, and belongs to no file.
    """
    for old, new in known.reworded.items():
        if old not in source:
            raise ValueError(f"reworded, but not there: {old!r}")
        source = source.replace(old, new)
    folder = _Folder(source, known)
    folded = folder.whole()
    if lost := sorted(set(known.replaced) - folder.found):
        raise ValueError(f"replaced, but not there: {', '.join(lost)}")
    return folded


class _Folder:
    def __init__(self, source: str, known: Known) -> None:
        self.source, self.known = source.encode(), known
        self.tree = ast.parse(source)
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.constants = {**known.values, **known.parameters}
        self.found: set[str] = set()

    def whole(self) -> str:
        edits: list[tuple[int, int, str]] = []
        self._block(self.tree.body, edits, "")
        return self._apply(0, len(self.source), edits)

    # -- text ----------------------------------------------------------------------------------------

    def _span(self, node: Any) -> tuple[int, int]:
        first = min([node, *getattr(node, "decorator_list", ())], key=lambda one: one.lineno)
        start = self.starts[first.lineno - 1] + first.col_offset - (first is not node)  # with its @
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _lines(self, node: ast.stmt) -> tuple[int, int]:
        """Of a statement's whole lines, with the comments right above."""
        start, end = self._span(node)
        line = self.source.count(b"\n", 0, start)
        while line and self.source[self.starts[line - 1] : self.starts[line]].lstrip().startswith(b"#"):
            line -= 1
        return self.starts[line], self.source.index(b"\n", end) + 1

    def _apply(self, start: int, end: int, edits: list[tuple[int, int, str]]) -> str:
        text, at = [], start
        for first, last, new in sorted(edits):
            text += [self.source[at:first].decode(), new]
            at = last
        return "".join([*text, self.source[at:end].decode()])

    def _text(self, node: ast.AST) -> str:
        """Of an expression, folded."""
        value = self._value(node)
        if value is not _UNKNOWN and not isinstance(node, ast.Constant):
            return repr(value)
        if isinstance(node, ast.IfExp) and (test := self._truth(node.test)) is not _UNKNOWN:
            return self._text(node.body if test else node.orelse)
        if isinstance(node, ast.BoolOp):
            return self._bool(node)
        edits: list[tuple[int, int, str]] = []
        self._inside(node, edits)
        return self._apply(*self._span(node), edits)

    def _bool(self, node: ast.BoolOp) -> str:
        """Without the operands that are known and decide nothing; constants that stand there decide in their place."""
        is_and = isinstance(node.op, ast.And)
        known = [_UNKNOWN if isinstance(one, ast.Constant) else self._value(one) for one in node.values]
        rest = [
            one for one, value in zip(node.values, known, strict=True) if value is _UNKNOWN or bool(value) != is_and
        ]
        low = (ast.BoolOp, ast.IfExp, ast.Lambda, ast.NamedExpr)
        if len(rest) == 1:
            return self._text(rest[0])
        texts = [f"({self._text(one)})" if isinstance(one, low) else self._text(one) for one in rest]
        return f" {'and' if is_and else 'or'} ".join(texts)

    def _removed(self, node: ast.stmt, name: str) -> tuple[int, int, str]:
        if name in self.known.replaced:
            return (*self._span(node), self.known.replaced[name])
        return (*self._lines(node), "")

    # -- values --------------------------------------------------------------------------------------

    def _value(self, node: ast.AST) -> Any:
        """The constant that an expression is, or `_UNKNOWN`."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.JoinedStr):
            return _UNKNOWN
        if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Compare)) and not isinstance(
            getattr(node, "ctx", None), (ast.Store, ast.Del)
        ):
            written = ast.unparse(node)
            if written in self.constants:
                self.found.add(written)
                return self.constants[written]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            value = self._value(node.operand)
            return value if value is _UNKNOWN else not value
        if isinstance(node, ast.IfExp) and (test := self._truth(node.test)) is not _UNKNOWN:
            return self._value(node.body if test else node.orelse)
        if isinstance(node, ast.BoolOp):
            stop = isinstance(node.op, ast.Or)
            values = [self._value(one) for one in node.values]
            for value in values:
                if value is _UNKNOWN:
                    return _UNKNOWN
                if bool(value) == stop:
                    return value
            return values[-1]
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            return self._compare(node)
        return _UNKNOWN

    def _compare(self, node: ast.Compare) -> Any:
        left, right = self._value(node.left), self._value(node.comparators[0])
        if _UNKNOWN in (left, right):
            return _UNKNOWN
        kind = type(node.ops[0])
        if kind in (ast.Eq, ast.Is):
            return left == right
        return left != right if kind in (ast.NotEq, ast.IsNot) else _UNKNOWN

    def _truth(self, node: ast.AST) -> Any:
        """Of a condition: a part of an `and` that is false decides it, wherever it stands."""
        if isinstance(node, ast.BoolOp):
            stop = isinstance(node.op, ast.Or)
            values = [self._truth(one) for one in node.values]
            if any(value is not _UNKNOWN and bool(value) == stop for value in values):
                return stop
        value = self._value(node)
        return value if value is _UNKNOWN else bool(value)

    # -- statements ----------------------------------------------------------------------------------

    def _block(self, body: Sequence[ast.stmt], edits: list[tuple[int, int, str]], owner: str) -> None:
        removed = 0
        for place, statement in enumerate(body):
            own: list[tuple[int, int, str]] = []
            ended = self._statement(statement, own, owner)
            removed += own == [(*self._lines(statement), "")]
            edits += own
            rest = body[place + 1 :]
            if ended and rest:
                edits.append((self._lines(rest[0])[0], self._lines(rest[-1])[1], ""))
                return
        if body and removed == len(body):
            edits[-1] = (*self._lines(body[-1]), f"{' ' * body[-1].col_offset}pass\n")

    def _statement(self, node: ast.stmt, edits: list[tuple[int, int, str]], owner: str) -> bool:
        """Fold a statement; whether it never goes on to the next."""
        if isinstance(node, ast.If):
            return self._if(node, edits, owner)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            name = f"{owner}{node.name}"
            if name in self.known.dropped or name in self.known.replaced:
                self.found.add(name)
                edits.append(self._removed(node, name))
                return False
            if isinstance(node, ast.FunctionDef):
                self._signature(node, edits)
                for one in (*node.decorator_list, *filter(None, [node.returns])):
                    self._expression(one, edits)
            else:
                for one in (*node.decorator_list, *node.bases):
                    self._expression(one, edits)
            self._docstring(node, edits)
            self._block(node.body, edits, f"{name}." if isinstance(node, ast.ClassDef) else "")
            return False
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        written = [ast.unparse(one) for one in targets if one is not None]
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and any(
            one in self.constants or owner + one in (*self.known.dropped, *self.known.replaced) for one in written
        ):
            self.found |= {*written, *(owner + one for one in written)}
            edits.append(self._removed(node, owner + written[0]))
            return False
        if isinstance(node, ast.Assign) and self._several(node, edits):
            return False
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant) and self._value(node.value) is None:
            edits.append((*self._lines(node), ""))
            return False
        if isinstance(node, ast.Assert) and self._truth(node.test) is True:
            edits.append((*self._lines(node), ""))
            return False
        self._inside(node, edits)
        return isinstance(node, _ENDS)

    def _several(self, node: ast.Assign, edits: list[tuple[int, int, str]]) -> bool:
        """`a, b = x, y` without what is known; False where nothing of it is."""
        target, value = node.targets[0], node.value
        if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple) or len(target.elts) != len(value.elts):
            return False
        pairs = list(zip(target.elts, value.elts, strict=True))
        kept = [(one, new) for one, new in pairs if ast.unparse(one) not in self.constants]
        if len(kept) == len(pairs):
            return False
        left, right = (", ".join(one) for one in zip(*((ast.unparse(a), self._text(b)) for a, b in kept), strict=True))
        edits.append((*self._span(node), f"{left} = {right}"))
        return True

    def _if(self, node: ast.If, edits: list[tuple[int, int, str]], owner: str) -> bool:
        start, end = self._span(node)
        follows = self.source[start : start + 4] == b"elif"
        truth = self._truth(node.test)
        if truth is _UNKNOWN:
            inside: list[tuple[int, int, str]] = []
            self._block(node.body, inside, owner)
            self._block(node.orelse, inside, owner)
            if (
                not follows
                and not node.orelse
                and inside
                and inside[-1][2].strip() == "pass"
                and not isinstance(node.body[0], ast.Pass)
            ):
                edits.append((*self._lines(node), ""))
                return False
            self._expression(node.test, edits)
            edits += inside
            return False
        taken = node.body if truth else node.orelse
        if not taken:
            edits.append((start if follows else self._lines(node)[0], self._lines(node)[1], ""))
            return False
        own: list[tuple[int, int, str]] = []
        ended = self._block_ends(taken, own, owner)
        first, last = self._span(taken[0])[0], self._span(taken[-1])[1]
        end = self._lines(node)[1] - 1  # with what stands behind it
        if not truth and self.source[first : first + 4] == b"elif":
            text = self._apply(first, last, own)
            edits.append((start, end, text if follows else text[2:]))
            return ended
        first = self._lines(taken[0])[0]
        text = self._apply(first, self._lines(taken[-1])[1], own).rstrip("\n")
        if text.strip() == "pass" and not isinstance(taken[0], ast.Pass) and not follows:
            edits.append((*self._lines(node), ""))
            return False
        if follows:
            text = "else:\n" + text
        else:
            margin = " " * node.col_offset
            text = textwrap.indent(textwrap.dedent(text), margin)[len(margin) :]
        edits.append((start, end, text))
        return ended

    def _block_ends(self, body: Sequence[ast.stmt], edits: list[tuple[int, int, str]], owner: str) -> bool:
        self._block(body, edits, owner)
        return isinstance(body[-1], _ENDS)

    # -- functions -----------------------------------------------------------------------------------

    def _signature(self, node: ast.FunctionDef, edits: list[tuple[int, int, str]]) -> None:
        args = node.args
        every = [*args.posonlyargs, *args.args]
        defaults = [None] * (len(every) - len(args.defaults)) + args.defaults
        keyword = list(zip(args.kwonlyargs, args.kw_defaults, strict=True))
        gone = {one.arg for one in (*every, *args.kwonlyargs)} & set(self.known.parameters)
        if not gone:
            for one in (*every, *args.kwonlyargs, *args.defaults, *filter(None, args.kw_defaults)):
                self._expression(one, edits)
            return
        self.found |= gone

        def write(argument: ast.arg, default: ast.expr | None) -> str:
            return self._text(argument) + ("" if default is None else f" = {self._text(default)}")

        texts = [write(one, default) for one, default in zip(every, defaults, strict=True) if one.arg not in gone]
        rest = [write(one, default) for one, default in keyword if one.arg not in gone]
        if args.vararg or rest:
            texts.append("*" + (self._text(args.vararg) if args.vararg else ""))
        texts += rest
        if args.kwarg:
            texts.append("**" + self._text(args.kwarg))
        parts = [*every, *args.kwonlyargs, *args.defaults, *filter(None, (*args.kw_defaults, args.kwarg))]
        spans = [self._span(one) for one in parts]
        edits.append((min(one[0] for one in spans), max(one[1] for one in spans), ", ".join(texts)))

    def _docstring(self, node: ast.FunctionDef | ast.ClassDef, edits: list[tuple[int, int, str]]) -> None:
        """Without the entries of parameters that are gone."""
        if ast.get_docstring(node) is None:
            return
        start, end = self._span(node.body[0])
        text = old = self.source[start:end].decode()
        for name in [*self.known.parameters, *(one.removeprefix("self.") for one in self.known.values)]:
            if not name.isidentifier():
                continue
            text = re.sub(rf"\n( +){name}: .*(\n\1    .*)*", "", text)
        if text != old:
            text = re.sub(r"\n\n +(?:Args|Attributes):(?=\n\n|\n +\"\"\")", "", text)
            edits.append((start, end, text))

    # -- expressions ---------------------------------------------------------------------------------

    def _expression(self, node: ast.AST, edits: list[tuple[int, int, str]]) -> None:
        start, end = self._span(node)
        text = self._text(node)
        if text != self.source[start:end].decode():
            edits.append((start, end, text))

    def _inside(self, node: ast.AST, edits: list[tuple[int, int, str]]) -> None:
        """Fold what is below a node; nothing in f-strings, whose parts have no places of their own in Python 3.11."""
        if isinstance(node, ast.JoinedStr):
            return
        if isinstance(node, ast.Call):
            self._call(node, edits)
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                continue
            if isinstance(child, (ast.expr, ast.arg)):
                if not isinstance(getattr(child, "ctx", None), (ast.Store, ast.Del)):
                    self._expression(child, edits)
            else:
                self._inside(child, edits)
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                self._block(block, edits, "")

    def _call(self, node: ast.Call, edits: list[tuple[int, int, str]]) -> None:
        def name(one: ast.expr | ast.keyword) -> str | None:
            return one.arg if isinstance(one, ast.keyword) else getattr(one, "id", None)

        self._expression(node.func, edits)
        arguments: list[ast.expr | ast.keyword] = [*node.args, *node.keywords]
        gone = set(self.known.parameters) & {name(one) for one in arguments}
        if not gone:
            for one in arguments:
                self._expression(one.value if isinstance(one, ast.keyword) else one, edits)
            return
        self.found |= gone
        kept = [one for one in arguments if name(one) not in gone]
        texts = [
            f"{one.arg}={self._text(one.value)}"
            if isinstance(one, ast.keyword) and one.arg
            else f"**{self._text(one.value)}"
            if isinstance(one, ast.keyword)
            else self._text(one)
            for one in kept
        ]
        spans = [self._span(one) for one in arguments]
        edits.append((min(one[0] for one in spans), max(one[1] for one in spans), ", ".join(texts)))
