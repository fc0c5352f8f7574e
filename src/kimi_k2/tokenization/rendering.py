"""The process that `renderer` starts: reads templates and variables, writes texts and whose their special tokens are.

Or reads arguments of a call and schemas of tools, and writes why each does not take them.

Its Jinja environment is the stock sandbox with the names, filters and tags that transformers gives chat templates
(`transformers.utils.chat_template_utils`, 5.23). A template is rendered twice: as it is, and with characters that
nobody's text has in place of those of special tokens, and of their beginnings and ends, in its own source. Put back,
these must give the same text, and they show which special tokens the template wrote itself.
"""

from __future__ import annotations

import json
import marshal
import random
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kimi_k2.tokenization.messages import ROLES
from kimi_k2.tokenization.renderer import HEAD

# Methods and filters whose arguments are looked for in a text, and not written.
_LOOK = (
    "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "rindex", "count",
    "strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "replace", "trim",
    "select", "reject", "selectattr", "rejectattr",
)  # fmt: skip
# Code points without a meaning of their own, in blocks that have room for the characters of all special tokens.
_PRIVATE, _BLOCK = range(0xF0, 0x10F), 12


class _Generation(Extension):
    """`{% generation %}`, which marks what a model wrote; a prompt is the same with it."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja's form

    def parse(self, parser: Any) -> nodes.CallBlock:
        """The block as a call that gives back its body, whose assignments stay inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)  # type: ignore[return-value]

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Marks:
    """Characters that stand for those of special tokens where a template wrote them.

    Args:
        names: of the special tokens.
        block: of the code points that are used.
    """

    def __init__(self, names: tuple[str, ...], block: int) -> None:
        letters = [letter for letter in sorted(set("".join(names))) if not letter.isspace()][: 1 << _BLOCK]
        self._to = {ord(letter): (block << _BLOCK) + number for number, letter in enumerate(letters)}
        self._back = {mark: letter for letter, mark in self._to.items()}
        self._names, self._longest = names, max(map(len, names))
        self._begins = {name[:size] for name in names for size in range(1, len(name) + 1)}
        self._ends = {name[start:] for name in names for start in range(len(name))}
        self.special = re.compile("|".join(map(re.escape, names)))
        self.own = re.compile("|".join(re.escape(self.marked(name)) for name in names))

    def marked(self, text: str) -> str:
        """The text with all its characters marked that special tokens have."""
        return text.translate(self._to)

    def plain(self, text: str) -> str:
        """The text without marks."""
        return text.translate(self._back)

    def inner(self, text: str) -> str:
        """Marked where it is a piece of a special token as a whole, else as by `pieces`."""
        return self.marked(text) if any(text in name for name in self._names) else self.pieces(text)

    def pieces(self, text: str) -> str:
        """The text with its special tokens marked, and what may begin or end one that other text completes."""
        own = bytearray(len(text))
        for index, letter in enumerate(text):
            sizes = range(self._longest, 0, -1)
            if letter in self._begins:
                size = next(size for size in sizes if text[index : index + size] in self._begins)
                own[index : index + size] = b"\1" * len(text[index : index + size])
            if letter in self._ends:
                start = next(
                    index + 1 - size for size in sizes if text[max(index + 1 - size, 0) : index + 1] in self._ends
                )
                own[max(start, 0) : index + 1] = b"\1" * (index + 1 - max(start, 0))
        return "".join(self.marked(letter) if mark else letter for letter, mark in zip(text, own, strict=True))


class _Marking(NodeTransformer):
    """Marks the text of a template's tree, but for what is compared with text or looked for in it."""

    def __init__(self, marks: _Marks) -> None:
        self._marks = marks

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802 -- Jinja's names
        return nodes.TemplateData(self._marks.pieces(node.data), lineno=node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        value = self._marks.pieces(node.value) if isinstance(node.value, str) else node.value
        return nodes.Const(value, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Node) -> nodes.Node:  # noqa: N802
        return node

    visit_Test = visit_Compare  # noqa: N815

    def visit_Call(self, node: Any) -> nodes.Node:  # noqa: N802
        name = node.node.attr if isinstance(node.node, nodes.Getattr) else ""
        return self._looking(node, name) if name in _LOOK else self.generic_visit(node)

    def visit_Filter(self, node: Any) -> nodes.Node:  # noqa: N802
        return self._looking(node, node.name) if node.name in _LOOK else self.generic_visit(node)

    def _looking(self, node: Any, name: str) -> nodes.Node:
        node.node = node.node and self.visit(node.node)
        if name == "replace":
            node.args[1:] = map(self.visit, node.args[1:])
        return node  # type: ignore[no-any-return]

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        node.nodes = list(map(self._written, node.nodes))
        return node

    def _written(self, node: Any) -> Any:
        """An expression whose value is written as it is: a role, which is one of a few words, may be part of a name."""
        if isinstance(node, nodes.CondExpr):
            node.expr1, node.expr2 = self._written(node.expr1), node.expr2 and self._written(node.expr2)
        elif isinstance(node, nodes.Concat):
            node.nodes = list(map(self._written, node.nodes))
        elif isinstance(node, nodes.Add):
            node.left, node.right = self._written(node.left), self._written(node.right)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            return nodes.Const(self._marks.inner(node.value), lineno=node.lineno)
        elif (isinstance(node, nodes.Getattr) and node.attr == "role") or (
            isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "role"
        ):
            return nodes.Filter(node, "marked_role", [], [], None, None, lineno=node.lineno)
        else:
            return self.visit(node)
        return node


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@lru_cache(8)
def _marks(names: tuple[str, ...], block: int) -> _Marks:
    return _Marks(names, block)


@lru_cache(16)
def _compiled(source: str, marks: _Marks | None = None) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    if marks is None:
        return environment.from_string(source)
    environment.filters["marked_role"] = lambda role: marks.marked(role) if role in ROLES else role
    tree = _Marking(marks).visit(environment.parse(source))
    return environment.from_string(tree.set_environment(environment))


def _rendered(names: tuple[str, ...], source: str, variables: dict[str, Any] | None, own: dict[str, str]) -> list[Any]:
    """Pieces of what the template writes, each with whether it is a special token of the template's own."""
    if variables is None:
        _compiled(source)
        return []
    now = {"strftime_now": datetime.now().strftime}
    random.seed(0)  # two renderings choose the same
    text = _compiled(source).render({**own, **now, **variables})
    taken = {ord(letter) >> _BLOCK for each in _texts([source, own, variables]) for letter in set(each)}
    free = next((block for block in _PRIVATE if block not in taken), None)
    if free is None:
        raise jinja2.TemplateError("messages: characters of every block of private use")
    marks = _marks(names, free)
    if not marks.special.search(text):
        return [[text, False]]
    random.seed(0)
    try:
        given = {name: marks.marked(token) for name, token in own.items()}
        marked = _compiled(source, marks).render({**given, **now, **variables})
    except (MemoryError, RecursionError):
        raise
    except Exception:  # any: it does not fail as it is
        marked = ""
    if marks.plain(marked) != text:
        raise jinja2.TemplateError(
            "it changes or compares special tokens that it writes, so whose they are is not known"
        )
    pieces, end = [], 0
    for match in marks.own.finditer(marked):
        pieces += [[_text(marked[end : match.start()], marks), False], [marks.plain(match[0]), True]]
        end = match.end()
    return [*pieces, [_text(marked[end:], marks), False]]


def _text(marked: str, marks: _Marks) -> str:
    """Text between the template's special tokens, in which none is the template's in part."""
    text = marks.plain(marked)
    for match in marks.special.finditer(text):
        if marked[slice(*match.span())] != match[0]:
            raise jinja2.TemplateError(f"it puts {match[0]} together of its own text and other's")
    return text


def _problems(arguments: Any, schemas: list[Any]) -> Iterator[str | None]:
    """Of each schema why it does not take the arguments, None if it does."""
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]

    for given in schemas:
        schema = {"type": "object"} if given in (None, {}) else given
        try:
            Draft202012Validator.check_schema(schema)
            error = next(Draft202012Validator(schema, registry=REGISTRY).iter_errors(arguments), None)
            yield None if error is None else f"arguments do not fit the schema: {error.message[:200]}"
        except SchemaError as wrong:
            yield f"the tool's schema cannot be used: {wrong.message[:200]}"
        except MemoryError:
            raise
        except Exception as wrong:  # any: a reference may lead to what is no schema, and is taken for one
            yield f"the tool's schema cannot be used: {str(wrong)[:200] or type(wrong).__name__}"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


def _reply(request: bytes) -> bytes:
    try:
        names, given = marshal.loads(request)
        made = _problems if names is None else partial(_rendered, names)
        return json.dumps(list(made(*marshal.loads(given)))).encode()
    except MemoryError:
        problem = "it takes too much memory"
    except RecursionError:
        problem = "it nests or calls itself too deeply"
    except Exception as error:  # all that Python can raise, a template can make it raise
        problem = str(error) or type(error).__name__
    return json.dumps({"error": problem}).encode()


def _limit(seconds: float, memory: int) -> None:
    # SIGPROF ends a process that has no handler for it, whatever it does.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if memory:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))


def _taken() -> int:
    """Bytes of address space that this process has now; 0 where the system does not say."""
    statistics = Path("/proc/self/statm")
    return int(statistics.read_text().split()[0]) * resource.getpagesize() if statistics.exists() else 0


def serve() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    taken = _taken()
    while head := requests.read(HEAD.size):
        seconds, memory, size = HEAD.unpack(head)
        request = requests.read(size)
        _limit(seconds, taken and taken + memory)
        reply = _reply(request)
        _limit(0.0, 0)
        replies.write(len(reply).to_bytes(8, "big") + reply)
        replies.flush()
