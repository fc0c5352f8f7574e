"""The process that `renderer` starts: reads templates and variables, writes texts and whose they are.

Its Jinja environment is what transformers gives chat templates, with strings that know who wrote them. Names, filters
and tags are those of `transformers.utils.chat_template_utils` (5.23). A compiled template's own text and string
constants are `TracedText` of its own; so is what it is given of special tokens; all else is not.
"""

from __future__ import annotations

import json
import marshal
import resource
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context
from markupsafe import Markup, soft_str

from kimi_k2.tokenization.renderer import HEAD
from kimi_k2.tokenization.traced import TracedText, copied, joined, marked_safe, own_spans, traced, written


class _Generation(Extension):
    """`{% generation %}`, which marks what a model wrote; a prompt is the same with it."""

    tags = {"generation"}  # noqa: RUF012 -- Jinja's form

    def parse(self, parser: Parser) -> nodes.CallBlock:
        """The block as a call that gives back its body, whose assignments stay inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_body"), [], [], body)
        block.set_lineno(line)
        return block

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Generator(CodeGenerator):
    """Writes code in which the template's own strings are known as such."""

    def _own(self, text: str) -> str:
        self.environment.literals[text] = written(text)  # type: ignore[attr-defined]
        return f"environment.literals[{text!r}]"

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return self._own("".join(group))

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:  # noqa: N802 -- Jinja's name
        """A constant, which may be a list of constants."""
        self.write(self._constant(node.as_const(frame.eval_ctx)))

    def _constant(self, value: Any) -> str:
        if isinstance(value, Markup):
            return f"environment.filters['safe']({self._own(str(value))})"
        if isinstance(value, str):
            return self._own(value)
        if isinstance(value, tuple):
            return f"({''.join(f'{self._constant(item)}, ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._constant, value))}]"
        if isinstance(value, dict):
            items = (f"{self._constant(key)}: {self._constant(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        return str(value) if isinstance(value, float) else repr(value)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 -- Jinja's name
        """The operator `~`."""
        if frame.eval_ctx.volatile or frame.eval_ctx.autoescape:
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(str, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles one template.

    Attributes:
        literals: its text and string constants.
    """

    code_generator_class = _Generator
    concat = staticmethod(joined)

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.literals: dict[str, TracedText] = {}
        join, indent = self.filters["join"], self.filters["indent"]

        @pass_eval_context
        def traced_join(context: Any, value: Any, d: str = TracedText(""), attribute: Any = None) -> Any:
            return join(context, value, d, attribute)

        self.filters["tojson"] = _to_json
        self._traced = {
            "string": lambda value: copied(soft_str, value),
            "join": traced_join,
            "indent": lambda *values, **named: copied(indent, *values, **named),
            "safe": marked_safe,
        }
        self._plain = {name: self.filters[name] for name in self._traced}
        self.globals.update(
            dict=_Dict(), namespace=_Namespace, raise_exception=_raise_exception, strftime_now=_strftime_now
        )

    def _generate(self, *values: Any, **named: Any) -> str:
        # Jinja folds constants with its own filters, whose results it can write into code.
        self.filters.update(self._plain)
        try:
            return super()._generate(*values, **named)
        finally:
            self.filters.update(self._traced)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`format` and `format_map`, as Jinja's sandbox has them."""
        wrap = super().wrap_str_format
        if wrap(value) is None or not isinstance(value.__self__, TracedText):
            return wrap(value)

        def run(form: str, *values: Any, **named: Any) -> Any:
            made = wrap(getattr(form, value.__name__))
            return made(*values, **named) if made else None

        return lambda *values, **named: copied(run, value.__self__, *values, **named)


class _Dict:
    """Jinja's `dict`, without what Python's class has."""

    def __call__(self, *values: Any, **named: Any) -> dict[Any, Any]:
        return dict(*values, **named)

    def fromkeys(self, *values: Any, **named: Any) -> dict[Any, Any]:
        """As of `dict`."""
        return dict.fromkeys(*values, **named)


class _Namespace(Namespace):
    """Jinja's `namespace`, whose names do not begin with an underscore."""

    def __init__(*values: Any, **named: Any) -> None:
        self, *rest = values
        made: Mapping[str, Any] = dict(*rest, **named)
        for name in made:
            _check_name(name)
        Namespace.__init__(self, made)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"namespace: expected no name that begins with _, got {name!r}")


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


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(8)
def _compiled(source: str) -> jinja2.Template:
    return ChatEnvironment().from_string(source)


def _rendered(source: str, variables: dict[str, Any] | None, own: dict[str, str]) -> dict[str, Any]:
    template = _compiled(source)
    if variables is None:
        return {"text": "", "own": []}
    values = traced(variables)
    for message in values["messages"]:
        message["role"] = written(message["role"])  # one of a few words, and part of markup in some templates
    text = template.render({**{name: written(value) for name, value in own.items()}, **values})
    return {"text": text, "own": own_spans(text)}


def _reply(request: bytes) -> bytes:
    try:
        return json.dumps(_rendered(*marshal.loads(request))).encode()
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
