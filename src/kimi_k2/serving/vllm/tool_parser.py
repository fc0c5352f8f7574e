"""`--tool-call-parser kimi_k2_stream`: the parser of `tokenization.tool_calls` behind vLLM's interface."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from kimi_k2.serving.vllm.adapter import (
    ExtractedToolCallInformation,
    ParserEngineToolAdapter,
    SamplingParams,
    StructuredOutputsParams,
    ToolParser,
    VLLMValidationError,
    validate_xgrammar_grammar,
)
from kimi_k2.serving.vllm.parsing import ReasoningEnds, aligned_lexer, delta_message
from kimi_k2.tokenization.deltas import Content, Delta, collect, merged, openai_delta
from kimi_k2.tokenization.erasing import MarkerEraser
from kimi_k2.tokenization.lexer import Lexeme, Marker, TextLexer
from kimi_k2.tokenization.tool_calls import ToolCallMachine

logger = logging.getLogger("vllm.kimi_k2")

_TAGS = (Marker.THINK, Marker.THINK_END)


class _NoCalls:
    """Stands for a `ToolCallMachine` where a request's tool_choice is none: text is content, markers are dropped."""

    in_call = False

    def push(self, lexeme: Lexeme) -> Iterator[Delta]:
        if isinstance(lexeme, str):
            yield Content(lexeme)

    def finish(self) -> Iterator[Delta]:
        return iter(())


class _Quotes:
    """Reads a call's lexemes where a spelling within a string of JSON is text, as the grammar has it."""

    def __init__(self) -> None:
        self._in_string = self._escaped = False

    def read(self, lexeme: Lexeme) -> Lexeme:
        """The lexeme, or the text of a marker that is quoted."""
        if isinstance(lexeme, Marker):
            if self._in_string:
                return lexeme.value
            return lexeme
        for character in lexeme:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = self._in_string
            elif character == '"':
                self._in_string = not self._in_string
        return lexeme


def _forces_calls(request: Any) -> bool:
    """Whether a request wants calls in any case."""
    return getattr(request, "tool_choice", None) not in (None, "auto", "none")


def _has_grammar(request: Any) -> bool:
    """Whether vLLM holds a request's calls to a grammar: forced ones, and those of tools that are `strict`."""
    constraint = getattr(request, "structured_outputs", None)
    return _forces_calls(request) or getattr(constraint, "structural_tag", None) is not None


def _held_to_schema(tool: Any) -> Any:
    """A tool of a request whose calls are forced; one of another kind than functions as it is."""
    function = getattr(tool, "function", tool)
    if getattr(function, "strict", True) is not None or not function.parameters:
        return tool
    held = _grammars_schema(function.name, json.dumps(function.parameters))
    if held is None:
        return tool
    strict = function.model_copy(update={"strict": True, "parameters": held})
    return strict if function is tool else tool.model_copy(update={"function": strict})


@lru_cache(maxsize=1024)
def _grammars_schema(name: str, schema: str) -> Any:
    """What of a function's schema vLLM's grammars can hold a forced call to, None for nothing; the rest is logged."""
    given = json.loads(schema)
    held = _without_lengths(given)
    try:
        validate_xgrammar_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(json=held)))
    except (TypeError, ValueError, VLLMValidationError) as error:
        logger.warning("kimi-k2: a forced call of %s takes any JSON, its schema has no grammar: %s", name, error)
        return None
    if held != given:
        logger.warning("kimi-k2: a forced call of %s has strings of any length: no grammar holds it to others", name)
    return held


def _without_lengths(schema: Any) -> Any:
    """Without bounds on strings: xgrammar then takes no escapes, so no line break or quote, but control characters."""
    if isinstance(schema, list):
        return [_without_lengths(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("const", "default", "enum", "examples") else _without_lengths(value)
        for key, value in schema.items()
        if key not in ("minLength", "maxLength") or isinstance(value, dict)  # a property of that name
    }


def definitions(tools: Iterable[Any]) -> list[dict[str, Any]]:
    """A request's tools as OpenAI's Chat Completions define them; the Responses API has the function's fields outside.

    Args:
        tools: vLLM's models of them.
    """
    functions = []
    for tool in tools:
        fields = tool.model_dump()
        functions.append(fields if "function" in fields else {"type": "function", "function": fields})
    return functions


class KimiK2StreamToolParser(ParserEngineToolAdapter):  # type: ignore[misc]  # vLLM has no types for mypy here
    """One reply's tool calls; vLLM makes one for each choice of a request.

    vLLM sets `skip_reasoning_parsing` where no reasoning parser runs before: then <think> tags are content.
    """

    _parser_engine_cls = ReasoningEnds
    structural_tag_model = "kimi"  # of the grammar for required and strict calls, as vLLM's own parser names it

    def __init__(self, tokenizer: Any, tools: Sequence[Any] | None = None, **keywords: Any) -> None:
        super().__init__(tokenizer, tools, **keywords)
        self._lexer = aligned_lexer(tokenizer, self.vocab)
        self._machine: ToolCallMachine | _NoCalls | None = None
        self._by_grammar = False
        self._quotes = _Quotes()

    def adjust_request(self, request: Any) -> Any:
        """Ask for text with markers in it, and in versions without structural tags for JSON where calls are forced."""
        request = ToolParser.adjust_request(self, request)  # its adapter asks for them where no calls are wanted, too
        if request.tools and request.tool_choice != "none":
            request.skip_special_tokens = False
        return request

    def get_structural_tag(self, request: Any, **keywords: Any) -> Any:
        """The grammar of calls: forced ones keep to their tool's schema, where vLLM itself takes any JSON.

        A tool's `strict` is obeyed where the client says it. What vLLM's backend cannot express is named in its log.
        """
        if _forces_calls(request):
            request = request.model_copy(update={"tools": [_held_to_schema(tool) for tool in request.tools]})
        return super().get_structural_tag(request, **keywords)

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Parse a whole reply: its calls and its content, each complete."""
        lexer, machine, self._by_grammar = TextLexer(), self._new_machine(request), _has_grammar(request)
        eraser = MarkerEraser()
        lexemes = [*lexer.feed(model_output), *lexer.flush()]
        deltas = eraser.push([*self._push(machine, lexemes), *machine.finish()])
        message = collect(merged([*deltas, *eraser.finish()]))
        calls = message.to_openai().get("tool_calls", [])
        # Without calls, vLLM 0.24 takes the reply as it was, markers included, unless told that there are some.
        called = bool(calls) or message.content != model_output
        return ExtractedToolCallInformation(tools_called=called, tool_calls=calls, content=message.content or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        """What these tokens add to the message; None if nothing yet."""
        if self._machine is None:
            self._machine, self._by_grammar = self._new_machine(request), _has_grammar(request)
        # A grammar takes markers by their text, so the model may spell them with ordinary tokens.
        self._lexer.feed(delta_text, () if self._by_grammar else delta_token_ids)
        return delta_message(**openai_delta(merged(self._push(self._machine, self._lexer.lexemes()))))

    def finish_streaming(self) -> Any:
        """What was held back, at the end of the reply; None if nothing."""
        if self._machine is None:
            return None
        last = self._push(self._machine, self._lexer.flush())
        return delta_message(**openai_delta(merged([*last, *self._machine.finish()])))

    def _new_machine(self, request: Any) -> ToolCallMachine | _NoCalls:
        """A parser that knows the request's tools; where the client wants no calls, one that makes all content."""
        if getattr(request, "tool_choice", None) == "none":
            return _NoCalls()
        return ToolCallMachine(definitions(self.tools or getattr(request, "tools", None) or ()))

    def _push(self, machine: ToolCallMachine | _NoCalls, lexemes: Iterable[Lexeme]) -> Iterator[Delta]:
        tags_are_text = getattr(self, "skip_reasoning_parsing", False)  # vLLM 0.24 has no such attribute
        for lexeme in lexemes:
            if self._by_grammar and machine.in_call:
                lexeme = self._quotes.read(lexeme)
            if tags_are_text and isinstance(lexeme, Marker) and lexeme in _TAGS and not machine.in_call:
                yield from machine.push(lexeme.value)
            else:
                yield from machine.push(lexeme)
