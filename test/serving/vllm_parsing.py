"""Replies put through vLLM's own composition of parsers, whole and as streams, as its server does it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from typing import Any

from parser_cases import check_nothing_is_lost, cut

from kimi_k2.synthetic.checkpoint import synthetic_ranks
from kimi_k2.tokenization.deltas import (
    AssistantMessage,
    Content,
    Delta,
    Reasoning,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
    collect,
)
from kimi_k2.tokenization.special_tokens import IM_ASSISTANT, IM_MIDDLE, THINK, THINK_END, special_tokens
from kimi_k2.tokenization.tokenizer import KimiTokenizer

NAME = "kimi_k2_stream"
TOKENIZER = KimiTokenizer(synthetic_ranks(512), special_tokens(512))
# The cases' tools, whose schemas take no arguments at all: a call's id alone tells.
ANY = [
    {"type": "function", "function": {"name": name, "parameters": {"not": {}}}}
    for name in (
        "f",
        "g",
        "get",
        "run",
        "read",
        "read_file",
        "list-files",
        "mcp__portal__search-docs",
        "weather",
        "news",
        "mail",
        "my.name.space",
    )
]


class Tokenizer:
    """As much of a Hugging Face tokenizer as parsers ask for.

    Args:
        prefilled: its chat template opens the reasoning.
    """

    def __init__(self, prefilled: bool = False) -> None:
        self.prefilled = prefilled

    def get_vocab(self) -> dict[str, int]:
        return dict(TOKENIZER.special_tokens)

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return TOKENIZER.decode(list(ids))

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        opening = f"{THINK}{THINK_END}" if options.get("thinking") is False else THINK
        return f"{IM_ASSISTANT}assistant{IM_MIDDLE}" + (opening if self.prefilled else "")

    def prompt(self, **options: Any) -> list[int]:
        return TOKENIZER.encode(self.apply_chat_template([], **options), allow_special=True)


def request(tools: list[dict[str, Any]] | None = None, **fields: Any) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    fields = {"tools": tools or ANY, "tool_choice": "auto", **fields}
    return ChatCompletionRequest(messages=[{"role": "user", "content": "go"}], model="m", **fields)


def new_parser(
    tokenizer: Tokenizer, asked: Any, *, reasoning: str | None = NAME, tools: str | None = NAME, **options: Any
) -> Any:
    """A parser as vLLM's server makes it for a choice of a request."""
    from vllm.parser import ParserManager

    composed = ParserManager.get_parser(tools, reasoning, tools is not None)
    return composed(tokenizer, asked.tools, chat_template_kwargs=options)


def changes(delta: Any, parsed: bool) -> Iterator[Delta]:
    """What a client reads of a delta of vLLM's.

    Args:
        delta: of a stream.
        parsed: by our parsers alone, which say something in each delta; else vLLM itself adds some.
    """
    said = {name: getattr(delta, name) for name in delta.model_fields_set}
    said.pop("tool_calls", None)  # which vLLM empties where none are wanted
    assert not parsed or delta.tool_calls or (said and all(said.values())), f"an empty delta or field: {said}"
    yield Reasoning(delta.reasoning or "")
    yield Content(delta.content or "")
    for change in delta.tool_calls or ():
        if change.id is not None:
            assert change.type == "function"
            yield ToolCallStart(change.index, change.id, change.function.name)
        yield ToolCallArguments(change.index, change.function.arguments or "")


def stream(
    pieces: Sequence[tuple[str, list[int]]], asked: Any, tokenizer: Tokenizer, **options: Any
) -> tuple[AssistantMessage, list[Any]]:
    """A stream of (text, ids), the last piece being the end."""
    parser, prompt = new_parser(tokenizer, asked, **options), tokenizer.prompt(**options)
    given = [
        parser.parse_delta(text, list(ids), asked, prompt_token_ids=prompt, finished=place == len(pieces))
        for place, (text, ids) in enumerate(pieces, 1)
    ]
    deltas = [delta for delta in given if delta is not None]
    read = [change for delta in deltas for change in changes(delta, options.get("tools", NAME) is not None)]
    starts = [change.index for change in read if isinstance(change, ToolCallStart)]
    assert starts == [*range(len(starts))]
    # As vLLM's server does where it says stop.
    return collect(read, "tool_calls" if starts else "stop"), deltas


def whole(text: str, asked: Any, tokenizer: Tokenizer, **options: Any) -> AssistantMessage:
    """A reply that is not streamed."""
    parser = new_parser(tokenizer, asked, **options)
    if hasattr(parser, "set_prompt_token_ids"):
        parser.set_prompt_token_ids(tokenizer.prompt(**options))
    reasoning, content, calls = parser.parse(text, asked, enable_auto_tools=True)
    found = [ToolCall(call.id, call.name, call.arguments, complete=False) for call in calls or ()]  # nobody says it
    return AssistantMessage(reasoning or "", content or "", found, "tool_calls" if found else "stop")


def tokens_and_text(
    ids: Sequence[int],
    draw: random.Random,
    steps: Sequence[int] = (1, 1, 1, 2, 5, 40),
    behind: Sequence[int] = (0, 0, 1, 7, 40),
) -> list[tuple[str, list[int]]]:
    """Pieces as vLLM's detokenizer gives them: some tokens at a time, the text some characters behind."""
    decoder = TOKENIZER.incremental_decoder()
    pieces: list[tuple[str, list[int]]] = []
    held, place = "", 0
    while place < len(ids):
        step = draw.choice(steps)
        group = list(ids[place : place + step])
        held += "".join(decoder.feed(token) for token in group)
        ready = max(len(held) - draw.choice(behind), 0)
        pieces.append((held[:ready], group))
        held, place = held[ready:], place + step
    return [*pieces, (held + decoder.flush(), [])]


def check_cuts(
    text: str, count: int, seed: int = 0, *, tools: list[dict[str, Any]] | None = None, prefilled: bool = False
) -> AssistantMessage:
    """What `parser_cases.check_cuts` holds of our parser, of vLLM with it: the same message however it is cut."""
    count = int(os.environ.get("KIMI_K2_DRAWS", count))
    tokenizer, asked, draw = Tokenizer(prefilled), request(tools), random.Random(seed)
    first, _ = stream([(text, []), ("", [])], asked, tokenizer)
    check_nothing_is_lost(text, first)
    complete = whole(text, asked, tokenizer)
    # vLLM makes content of white space alone null beside calls.
    assert complete.content == first.content or (not first.content.strip() and not complete.content)
    assert (complete.reasoning_content, complete.tool_calls) == (first.reasoning_content, first.tool_calls)
    ids = TOKENIZER.encode(text, allow_special=True)
    for _ in range(count):
        places = [draw.randrange(len(text) + 1) for _ in range(draw.choice((1, 1, 2, 5, 30)))]
        assert stream([*((piece, []) for piece in cut(text, places)), ("", [])], asked, tokenizer)[0] == first
        if "<|tool_call_section_" not in text:  # which is text alone, and no token
            assert stream(tokens_and_text(ids, draw), asked, tokenizer)[0] == first
    return first
