"""One part of a kernel held to the language: operators, statements, signatures, classes, and calls of NKI's names."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Iterator
from typing import Any

from nki_emulator.check.apis import ENUMERATED, entry, member_missing, wrong_parameters
from nki_emulator.check.gather import Part, module_of, resolve

# What the guide shows, or AWS's kernels use.
_BUILTINS = {
    "abs", "bool", "dict", "divmod", "enumerate", "float", "int", "isinstance", "len", "list", "max", "min", "print",
    "range", "str", "sum", "tuple", "zip", "round", "hash", "all", "any", "type", "pow", "hasattr", "getattr",
}  # fmt: skip
_RARE = {"hash", "all", "any", "type", "pow", "hasattr", "getattr", "round"}  # of these, what the guide lacks
_BASES = {"NKIObject", "Enum", "IntEnum"}
_STATEMENTS = (
    ast.With, ast.AsyncWith, ast.AsyncFor, ast.AsyncFunctionDef, ast.Delete, ast.Import, ast.ImportFrom, ast.Match,
    ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr,
)  # fmt: skip
# Rules that a node breaks by being there.
_REFUSED: tuple[tuple[str, type[ast.AST] | tuple[type[ast.AST], ...]], ...] = (
    ("statement", _STATEMENTS),
    ("comprehension", (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)),
    ("container", ast.Set),
    ("star", ast.Starred),
    ("lambda", ast.Lambda),
    ("closure", (ast.Nonlocal, ast.Global)),
    ("raise", ast.Raise),
    ("try", ast.Try),
)

Found = tuple[str, ast.AST, str]  # rule, where, what


def findings(part: Part, release: str) -> Iterator[Found]:
    """What a part breaks: (rule, node, words)."""
    if isinstance(part.node, ast.ClassDef):
        yield from _class(part, part.node, release)
    else:
        yield from _Function(part, part.node, release).run()


def _class(part: Part, node: ast.ClassDef, release: str) -> Iterator[Found]:
    for base in node.bases:
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", ast.unparse(base))
        if name not in _BASES:
            yield "class-base", node, f"class {node.name}({ast.unparse(base)})"
    if not node.bases:
        yield "class-base", node, f"class {node.name}"
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef):
            for decorator in statement.decorator_list:
                name = ast.unparse(decorator)
                if name == "property":
                    yield "property", decorator, f"@{name}"
                elif name != "staticmethod":
                    yield "decorator", decorator, f"@{name}"
            yield from _Function(part, statement, release).run()
        elif isinstance(statement, ast.ClassDef):
            yield "statement", statement, f"class {statement.name} inside a class"


class _Function:
    """Checks of one function or method."""

    def __init__(self, part: Part, node: ast.FunctionDef, release: str) -> None:
        self.part, self.node, self.release = part, node, release
        self.dictionaries: set[str] = set()

    def run(self) -> Iterator[Found]:
        yield from self._signature()
        for node in self._inside(self.node):
            if isinstance(node, ast.Assign):
                self._learn(node)
        for node in self._inside(self.node):
            yield from self._simple(node)
            check: Callable[[Any], Iterator[Found]] | None = getattr(self, f"_{type(node).__name__.lower()}", None)
            if check is not None:
                yield from check(node)

    def _inside(self, node: ast.AST) -> Iterator[ast.AST]:
        """All nodes of the body, without annotations, which the compiler leaves aside."""
        stack: list[ast.AST] = [*self.node.body, *self.node.args.defaults]
        while stack:
            current = stack.pop()
            yield current
            for name, value in ast.iter_fields(current):
                if name != "annotation" and not isinstance(value, str):
                    stack += _nodes(value)

    def _learn(self, node: ast.Assign) -> None:
        name, value = node.targets[0], node.value
        of_dictionary = isinstance(value, ast.Dict) or (
            isinstance(value, ast.Call) and ast.unparse(value.func) == "dict"
        )
        if isinstance(name, ast.Name) and of_dictionary:
            self.dictionaries.add(name.id)

    def _signature(self) -> Iterator[Found]:
        arguments = self.node.args
        if arguments.vararg or arguments.kwonlyargs or arguments.posonlyargs:
            yield "signature", self.node, f"{self.node.name}({ast.unparse(arguments)})"
        for decorator in self.node.decorator_list:
            for keyword in decorator.keywords if isinstance(decorator, ast.Call) else ():
                if keyword.arg in ("mode", "platform_target"):
                    yield f"jit-{keyword.arg.partition('_')[0]}", decorator, ast.unparse(decorator)

    def _simple(self, node: ast.AST) -> Iterator[Found]:
        for rule, kinds in _REFUSED:
            if isinstance(node, kinds):
                yield rule, node, ast.unparse(node).partition("\n")[0]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield "nested-function", node, f"{node.name} inside {self.node.name}"
        elif isinstance(node, ast.For | ast.While) and node.orelse:
            yield "loop-else", node, f"{type(node).__name__.lower()} ... else"

    def _compare(self, node: ast.Compare) -> Iterator[Found]:
        for operator in node.ops:
            if isinstance(operator, ast.Is | ast.IsNot):
                yield "is-operator", node, ast.unparse(node)
            elif isinstance(operator, ast.In | ast.NotIn):
                yield "in-operator", node, ast.unparse(node)

    def _binop(self, node: ast.BinOp) -> Iterator[Found]:
        if isinstance(node.op, ast.MatMult):
            yield "matmul-operator", node, ast.unparse(node)

    def _constant(self, node: ast.Constant) -> Iterator[Found]:
        value = node.value
        wide = isinstance(value, int) and not -(2**31) <= value < 2**32
        if wide or isinstance(value, complex | bytes):
            yield "value", node, ast.unparse(node)

    def _dict(self, node: ast.Dict) -> Iterator[Found]:
        for key in node.keys:
            if isinstance(key, ast.Constant) and not isinstance(key.value, str):
                yield "dictionary-key", node, ast.unparse(node)

    def _subscript(self, node: ast.Subscript) -> Iterator[Found]:
        of_dictionary = isinstance(node.value, ast.Name) and node.value.id in self.dictionaries
        if of_dictionary and isinstance(node.slice, ast.Constant) and not isinstance(node.slice.value, str):
            yield "dictionary-key", node, ast.unparse(node)

    def _attribute(self, node: ast.Attribute) -> Iterator[Found]:
        module = module_of(node.value, self.part.names)
        if module and entry(module, node.attr, self.release) is None:
            yield "api-name", node, f"nki.{module}.{node.attr}"
        holder = node.value
        if isinstance(holder, ast.Attribute):
            outer = module_of(holder.value, self.part.names)
            if outer and member_missing(outer, holder.attr, node.attr, self.release):
                yield "api-name", node, f"nki.{outer}.{holder.attr}.{node.attr}"
        if node.attr == "nki" and isinstance(holder, ast.Name) and holder.id == "neuronxcc":
            yield "old-namespace", node, "neuronxcc.nki"
        if module == "language" and node.attr == "dynamic_range":
            yield "deprecated-loop", node, "dynamic_range"
        if module == "language" and node.attr in ("affine_range", "sequential_range"):
            yield "deprecated-range", node, node.attr

    def _name(self, node: ast.Name) -> Iterator[Found]:
        if str(getattr(resolve(node, self.part.names), "__name__", "")).startswith("neuronxcc.nki"):
            yield "old-namespace", node, node.id

    def _call(self, node: ast.Call) -> Iterator[Found]:
        if isinstance(node.func, ast.Name):
            yield from self._builtin(node, node.func.id)
            return
        if not isinstance(node.func, ast.Attribute):
            return
        name, holder = node.func.attr, node.func.value
        module = module_of(holder, self.part.names)
        if module is None:
            return
        wrong = wrong_parameters(module, name, node, self.release)
        if wrong:
            yield "api-parameter", node, wrong
        arguments = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        for parameter, value in arguments.items():
            whole = isinstance(value, ast.Constant) and type(value.value) is int
            if whole and parameter in ENUMERATED:
                yield "integer-enumeration", node, f"{parameter}={ast.unparse(value)}"
            if parameter == "buffer" and isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield "string-buffer", node, f"buffer={ast.unparse(value)}"

    def _builtin(self, node: ast.Call, name: str) -> Iterator[Found]:
        if name == "super":
            yield "super", node, "super()"
        elif name in ("set", "frozenset"):
            yield "container", node, ast.unparse(node)
        elif name == "slice":
            yield "chained-slice", node, ast.unparse(node)
        elif name not in self.part.names and hasattr(builtins, name) and name not in _BUILTINS:
            if not isinstance(getattr(builtins, name), type) or not issubclass(getattr(builtins, name), BaseException):
                yield "builtin", node, name
        elif name in _RARE and name not in self.part.names:
            yield "rare-builtin", node, name


def _nodes(value: Any) -> list[ast.AST]:
    if isinstance(value, ast.AST):
        return [value]
    return [node for node in value if isinstance(node, ast.AST)] if isinstance(value, list) else []
