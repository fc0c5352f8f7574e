"""A Jinja environment in which a template can neither run for long nor build anything large.

Jinja's sandbox keeps a template from Python; it does not keep it from loops in loops, from `'a' * 10**10`, or from a
list that holds itself twice, forty times over. Here every value that a template makes is limited in size, so that each
single step is short, and every loop's turn, call, filter and operator looks at the clock.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kimi_k2.errors import TokenizerError

_T = TypeVar("_T")

MAX_SOURCE = 2**16
# CPU time of one rendering, beside a second for each million characters of input. A published template takes about
# 0.1 s for a thousand messages.
MAX_SECONDS = 1.0
# Characters of a string, or of all strings in a list, that a template may make, beside four times its input's; and
# of all that it makes, kept or not, beside sixteen times its input's.
MAX_CHARACTERS = 2**21
MAX_PRODUCED = 2**25
MAX_RANGE = 100_000
_MAX_BITS = 4096
_ITEM = 8  # an item of a list counts as so many characters
_LOOK_EVERY = 64  # steps between looks at the clock

# Jinja's filters but those that pad, fill up, compute without a bound or write HTML.
_FILTERS = {
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"),
    *("forceescape", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max"),
    *("min", "reject", "rejectattr", "replace", "reverse", "safe", "select", "selectattr", "sort", "string"),
    *("title", "tojson", "trim", "truncate", "unique", "upper", "urlencode", "wordcount"),
}
# Methods of strings that look for each character, or at each place, of one string in the other.
_SEARCHING = {"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"}
_MAX_SEARCH = 2**29
# Methods of strings that make long ones of short ones.
_GROWING = {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "translate", "zfill"}
_WIDE = re.compile(r"%[^%A-Za-z]*(?:\d{4}|\*)")


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template goes beyond a limit."""


class _Budget:
    """What is left of a rendering's limits."""

    def __init__(self, characters: int, seconds: float) -> None:
        self.characters = MAX_CHARACTERS + 4 * characters
        self._left = MAX_PRODUCED + 16 * characters
        self._seconds = min(seconds, MAX_SECONDS) + characters * 1e-6
        self._end = time.thread_time() + self._seconds
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps % _LOOK_EVERY == 0 and time.thread_time() > self._end:
            raise TemplateLimitError(f"it takes more than {self._seconds:.2g} s of CPU time")

    def limit(self, characters: int) -> None:
        if characters > self.characters:
            raise TemplateLimitError(f"it makes something of more than {self.characters} characters")

    def produce(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0:
            raise TemplateLimitError("it makes too much on its way")


# What Python code made from a template can raise; all are the template's fault, or the input's.
_FAILURES = (
    *(jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, MemoryError),
    *(SyntaxError, TypeError, ValueError),
)
_BUDGET: ContextVar[_Budget] = ContextVar("_BUDGET")


def bounded(action: Callable[..., _T], *arguments: Any, characters: int = 0, seconds: float = math.inf) -> _T:
    """Call something that compiles or renders a template, within the limits for so many characters of input.

    Raises:
        TokenizerError: it goes beyond a limit, nests too deeply, or fails in any way that a template can make it fail.
    """
    token = _BUDGET.set(_Budget(characters, seconds))
    try:
        return action(*arguments)
    except RecursionError:
        raise TokenizerError("it nests or calls itself too deeply") from None
    except _FAILURES as error:
        raise TokenizerError(str(error) or type(error).__name__) from None
    finally:
        _BUDGET.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """The environment that transformers gives chat templates, with limits; use it inside `bounded`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], functions: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        own = {name: made for name, made in self.filters.items() if name in _FILTERS}
        self.filters = {name: _checked_filter(name, made) for name, made in {**own, **filters}.items()}
        self.filters.update({"_counted": _counted, "_joined": _joined, "_checked": _checked})
        del self.globals["lipsum"]
        self.globals.update(
            {"range": _range, "dict": lambda *args, **named: _checked(dict(*args, **named)), **functions}
        )

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        _Limits(self).visit(source)  # changes the tree in place
        return super()._generate(source, *arguments, **options)

    def concat(self, parts: Iterable[str]) -> str:
        """The output of a template, macro or block."""
        budget, texts, characters = _BUDGET.get(), [], 0
        for part in parts:
            characters += len(part)
            budget.limit(characters)
            texts.append(part)
        budget.produce(characters)
        return "".join(texts)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As Jinja decides, but no methods that pad or format."""
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, (str, bytes)) and attr in _GROWING)

    def wrap_str_format(self, value: Any) -> None:
        """Nothing: `format` is not among the safe methods."""

    def call(self, context: Any, obj: Any, /, *args: Any, **named: Any) -> Any:
        """Call a function, method or macro of a template."""
        _BUDGET.get().step()
        text = getattr(obj, "__self__", None)
        if not isinstance(text, (str, bytes)):
            made = super().call(context, obj, *args, **named)
            return _checked(made) if isinstance(made, (str, bytes, int)) else made
        method = getattr(obj, "__name__", "")
        if method in _SEARCHING:
            _limit_search(text, *args)
        elif method == "replace":
            _limit_replace(text, *args)
        elif method == "join":
            args = ([str(part) for part in _listed(*args)],)
            _BUDGET.get().limit(sum(map(len, args[0])) + len(text) * len(args[0]))
        made = super().call(context, obj, *args, **named)
        if isinstance(made, (list, tuple)):
            _BUDGET.get().produce(_weight(made))
        return _checked(made)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The operators that can make large values of small ones."""
        budget = _BUDGET.get()
        budget.step()
        if operator == "*" and (_has_items(left) or _has_items(right)):
            items, count = (left, right) if _has_items(left) else (right, left)
            budget.limit(_weight(items) * max(int(count), 0))
        elif operator == "+" and _has_items(left) and _has_items(right):
            budget.limit(_weight(left) + _weight(right))
        elif operator == "%" and isinstance(left, (str, bytes)):
            if _WIDE.search(str(left)):
                raise TemplateLimitError("it formats with a width of four digits or more")
            budget.limit(len(left) * (1 + _weight(right)))
        elif operator == "**" and int(left).bit_length() * abs(int(right)) > _MAX_BITS:
            raise TemplateLimitError(f"it makes a number of more than {_MAX_BITS} bits")
        return _checked(super().call_binop(context, operator, left, right))


class _Limits(NodeTransformer):
    """Puts the checks into a parsed template that Jinja has no hook for."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def _filtered(self, node: nodes.Node, name: str, lineno: int) -> nodes.Filter:
        made = nodes.Filter(node, name, [], [], None, None)
        made.set_lineno(lineno).set_environment(self._environment)
        return made

    def visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> nodes.Node:
        """The node with checks in it, or a check around it."""
        self.generic_visit(node)
        if isinstance(node, nodes.For):
            node.iter = self._filtered(node.iter, "_counted", node.lineno)
        elif isinstance(node, nodes.Concat):
            return self._filtered(nodes.List(node.nodes), "_joined", node.lineno)
        elif isinstance(node, (nodes.List, nodes.Tuple, nodes.Dict)):
            is_target = isinstance(node, nodes.Tuple) and node.ctx != "load"
            if not is_target and not all(isinstance(item, nodes.Const) for item in node.items):
                return self._filtered(node, "_checked", node.lineno)
        return node


def _has_items(value: Any) -> bool:
    return isinstance(value, (str, bytes, list, tuple))


def _weight(value: Any) -> int:
    """Characters that a value has when written out, roughly: what lists share counts as often as it is shared."""
    budget = _BUDGET.get()
    total = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, Mapping):
            total += _ITEM * len(item)
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            total += _ITEM * len(item)
            waiting += item
        budget.step()
        budget.limit(total)
    return total


def _checked(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise TemplateLimitError(f"it makes a number of more than {_MAX_BITS} bits")
    _weight(value)
    if isinstance(value, (str, bytes)):
        _BUDGET.get().produce(len(value))
    elif isinstance(value, (list, tuple, dict)):
        _BUDGET.get().produce(_ITEM * len(value))
    return value


def _counted(values: Iterable[Any]) -> Iterator[Any]:
    """The values of a loop, each a step."""
    budget = _BUDGET.get()
    for value in values:
        budget.step()
        yield value


def _listed(values: Iterable[Any]) -> list[Any]:
    return list(_counted(values))


def _joined(values: list[Any]) -> str:
    """What Jinja's `~` makes."""
    _weight(values)
    texts = [str(value) for value in values]
    characters = sum(map(len, texts))
    _BUDGET.get().limit(characters)
    _BUDGET.get().produce(characters)
    return "".join(texts)


def _range(*arguments: int) -> range:
    values = range(*arguments)
    start, stop, step = values.start, values.stop, values.step
    if abs(stop - start) > MAX_RANGE * abs(step):  # len() overflows for large ones
        raise TemplateLimitError(f"range of more than {MAX_RANGE} numbers")
    return values


def _limit_search(text: str | bytes, *arguments: Any) -> None:
    searched = max((len(argument) for argument in arguments if isinstance(argument, (str, bytes))), default=0)
    if len(text) * searched > _MAX_SEARCH:
        raise TemplateLimitError(f"it looks for {searched} characters in {len(text)}")


def _limit_replace(text: Any, old: Any, new: Any, *_: Any) -> None:
    _BUDGET.get().limit(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _checked_filter(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that looks at the clock, refuses to grow its input, and whose result is checked."""

    @wraps(made)  # keeps Jinja's marks of which filters want the context
    def run(*arguments: Any, **named: Any) -> Any:
        budget = _BUDGET.get()
        budget.step()
        if name == "trim":
            _limit_search(str(arguments[0]), *arguments[1:], *named.values())
        elif name == "replace":
            _limit_replace(*(str(value) for value in arguments[1:4]))
        elif name == "indent":
            text, width = str(arguments[0]), named.get("width", arguments[1] if len(arguments) > 1 else 4)
            budget.limit(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))
        elif name == "join":
            values = _listed(arguments[1])
            separator = str(named.get("d", arguments[2] if len(arguments) > 2 else ""))
            budget.limit(_weight(values) + len(values) * len(separator))
            arguments = (arguments[0], values, *arguments[2:])
        result = made(*arguments, **named)
        return _checked(result) if name not in ("first", "last", "default", "d", "min", "max") else result

    return run
