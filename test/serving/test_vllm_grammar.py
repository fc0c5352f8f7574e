"""Grammars beside reasoning, through vLLM's own manager of structured output, which asks our parsers where they begin.

What a model would sample is drawn here from what the grammar's bitmask allows, with and without drafts.
KIMI_K2_DRAWS=300 draws as many streams and schemas.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import engines
import numpy as np
import pytest
import vllm_parsing
from parser_cases import tool

from kimi_k2.serving.vllm.plugin import register_parsers
from kimi_k2.tokenization.special_tokens import (
    ARGUMENT_BEGIN,
    CALL_BEGIN,
    CALL_END,
    IM_END,
    SECTION_BEGIN,
    SECTION_END,
    THINK,
    THINK_END,
)

engines.need("vllm")
register_parsers()
jsonschema = pytest.importorskip("jsonschema")

DRAWS = int(os.environ.get("KIMI_K2_DRAWS", "40"))
DRAFTED = 4
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')  # of JSON, in which the grammar takes a marker as text
MOST = 600  # tokens of a reply
# Ends of prompts: reasoning open, closed, for the model to open; and switched off by the request.
PROMPTS = {"open": THINK, "closed": THINK + THINK_END, "absent": "", "off": ""}


class Grammars:
    """vLLM's manager over its xgrammar backend, with the vocabulary of the tests' tokenizer."""

    def __init__(self, tokenizer: Any, special: dict[str, int], decode: Callable[[list[int]], bytes]) -> None:
        xgrammar = importlib.import_module("xgrammar")
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

        names = {token: name.encode() for name, token in special.items()}
        vocabulary = [names[token] if token in names else decode([token]) for token in range(max(names) + 1)]
        self.special, self.count, self.end = special, len(vocabulary), special[IM_END]
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
            scheduler_config=SimpleNamespace(max_num_seqs=1),
            model_config=SimpleNamespace(skip_tokenizer_init=True, is_diffusion=False),
            structured_outputs_config=SimpleNamespace(enable_in_reasoning=False, disable_any_whitespace=True),
            speculative_config=SimpleNamespace(num_speculative_tokens=DRAFTED),
            num_speculative_tokens=DRAFTED,
        )
        self.manager = StructuredOutputManager(config)
        self.manager.tokenizer = tokenizer
        backend = XgrammarBackend.__new__(XgrammarBackend)
        backend.vocab_size, backend.disable_any_whitespace = self.count, True
        backend.num_speculative_tokens = DRAFTED
        info = xgrammar.TokenizerInfo(vocabulary, vocab_size=self.count, stop_token_ids=[self.end])
        backend.compiler = xgrammar.GrammarCompiler(info)
        self.manager.backend = backend

    def request(self, constraint: Any, prompt: Sequence[int], reasoner: Any) -> Any:
        """What the scheduler has of a request whose grammar is compiled."""
        from vllm.v1.structured_output.request import StructuredOutputRequest

        asked = StructuredOutputRequest(constraint, reasoner=reasoner)
        kind, text = asked.structured_output_key
        asked.grammar = self.manager.backend.compile_grammar(kind, text)
        self.manager.reasoner_cls = type(reasoner)  # of which it would make one where a request has none
        return SimpleNamespace(
            request_id="r", structured_output_request=asked, use_structured_output=True,
            prompt_token_ids=list(prompt), all_token_ids=list(prompt),
        )  # fmt: skip

    def masks(self, request: Any, drafts: list[int]) -> Any:
        """bool [drafts + 1, tokens]: what may come at each place of a step."""
        packed = self.manager.grammar_bitmask({"r": request}, ["r"], {"r": drafts} if drafts else {})
        bits = np.unpackbits(packed.copy().view(np.uint8), axis=1, bitorder="little")
        return bits[: len(drafts) + 1, : self.count].astype(bool)

    def accept(self, request: Any, tokens: list[int]) -> bool:
        """Whether the grammar takes a step's tokens."""
        request.all_token_ids.extend(tokens)
        return bool(self.manager.accept_tokens(request, tokens))


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = vllm_parsing.TOKENIZER
    return Grammars(vllm_parsing.Tokenizer(), dict(tokenizer.special_tokens), tokenizer.decode_bytes)


class Sampler:
    """A model that reasons a little, then answers what its grammar allows, rather what closes than what goes on."""

    def __init__(self, grammars: Grammars, draw: random.Random, encode: Callable[..., list[int]], tools: str) -> None:
        self.grammars, self.draw, self.tokens = grammars, draw, 0
        self.reasons, self.called, self.section = draw.randrange(6), False, grammars.special[SECTION_BEGIN]
        special = grammars.special
        self.ends = [special[name] for name in (THINK_END, SECTION_BEGIN, SECTION_BEGIN)]
        self.text = encode("Let me see: it is so.")
        self.closing = [special[name] for name in (IM_END, SECTION_END, CALL_END)] + encode('}]"')
        section = encode(SECTION_BEGIN + CALL_BEGIN, allow_special=True) + encode(f"functions.{tools}:0")
        argument = [special[ARGUMENT_BEGIN], *encode('{"a": 1, "')]
        self.likely = [*self.text, self.ends[0], *section, *argument, *self.text, *section]

    def drafts(self) -> list[int]:
        start = self.draw.randrange(len(self.likely))
        return self.likely[start : start + self.draw.randrange(1, DRAFTED + 1)]

    def pick(self, allowed: Any, draft: int | None) -> int:
        self.tokens += 1
        if allowed.all():  # no grammar yet
            self.reasons -= 1
            if draft is not None and self.draw.random() < 0.8:
                return draft
            return self.draw.choice(self.text if self.reasons > 0 else self.ends)
        if draft is not None and allowed[draft] and self.draw.random() < 0.8:
            return draft
        if allowed[self.section] and not self.called and self.draw.random() < 0.5:
            self.called = True
            return self.section
        closing = [token for token in self.closing if allowed[token]]
        if closing and (self.tokens > 60 or self.draw.random() < 0.5):
            return self.draw.choice(closing)
        return int(self.draw.choice(np.flatnonzero(allowed).tolist()))

    def step(self, masks: Any, drafts: list[int]) -> list[int]:
        """The tokens that a step samples: those of its drafts that are taken, and one more."""
        tokens = []
        for allowed, draft in zip(masks, [*drafts, None], strict=True):
            tokens.append(self.pick(allowed, draft))
            if tokens[-1] != draft or tokens[-1] == self.grammars.end:
                break
        return tokens


def drawn_schema(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    """Of arguments: what tools of public benchmarks ask for."""
    leaves: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string"},
        lambda: {"type": "string", "enum": draw.sample(["north", "é", "a b", 'q"', "", "日本"], 2)},
        lambda: {"type": "integer", "minimum": draw.randrange(-3, 3), "maximum": draw.randrange(3, 400)},
        lambda: {"type": "number"},
        lambda: {"type": "boolean"},
        lambda: {"type": ["string", "null"]},
        lambda: {"const": draw.choice([1, "x", None])},
        lambda: {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": "^[a-z]{2,4}$"}]},
    ]
    inner: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "array", "items": drawn_schema(draw, depth - 1), "minItems": 1, "maxItems": 3},
        lambda: drawn_object(draw, depth - 1),
    ]
    return draw.choice(leaves + inner if depth > 0 else leaves)()


def drawn_object(draw: random.Random, depth: int = 2) -> dict[str, Any]:
    names = draw.sample(["a", "b", "city", "two words", "ü", "n"], draw.randrange(1, 4))
    schema = {"type": "object", "properties": {name: drawn_schema(draw, depth) for name in names}}
    schema["required"] = names[: draw.randrange(len(names) + 1)]
    return schema | ({"additionalProperties": False} if draw.random() < 0.5 else {})


def asked(draw: random.Random, choice: str) -> Any:
    """A request of one of the choices, for two tools of drawn schemas."""
    tools = [tool(name) for name in ("look", "run-it")]
    for definition in tools:
        definition["function"] |= {"parameters": drawn_object(draw)} | ({"strict": True} if choice == "auto" else {})
    named: Any = {"type": "function", "function": {"name": "run-it"}} if choice == "named" else choice
    return vllm_parsing.request(tools, tool_choice=named)


def parsers(request: Any, prompt: str) -> tuple[Any, dict[str, Any]]:
    options: dict[str, Any] = {"thinking": False} if prompt == "off" else {}
    parser = vllm_parsing.new_parser(vllm_parsing.Tokenizer(prompt == "open"), request, **options)
    parser.adjust_request(request)
    return parser, options


def prompt_ids(prompt: str) -> list[int]:
    encoded: list[int] = vllm_parsing.TOKENIZER.encode(
        f"<|im_assistant|>assistant<|im_middle|>{PROMPTS[prompt]}", allow_special=True
    )
    return encoded


def steps(grammars: Grammars, request: Any, sampler: Sampler, drafted: bool) -> Iterator[tuple[list[int], Any, Any]]:
    """(drafts as the manager leaves them, masks, tokens) of each step of a reply, until it ends."""
    while sampler.tokens < MOST and request.all_token_ids[-1] != grammars.end:
        drafts = grammars.manager.validate_tokens(request, sampler.drafts()) if drafted else []
        masks = grammars.masks(request, drafts)
        tokens = sampler.step(masks, drafts)
        yield drafts, masks, tokens
        if not grammars.accept(request, tokens):
            return


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("choice", ["required", "named", "auto", "json"])
def test_a_reply_beside_vllms_reasoner(choice: str, drafted: bool, grammars: Grammars) -> None:
    """Bounds, bitmasks, drafts left and tokens taken, step by step, for the tokens of the same stream.

    What comes of it is valid: calls by their tools' schemas, in one section.
    """
    from vllm.sampling_params import StructuredOutputsParams

    engine = pytest.importorskip("vllm.parser.engine.registered_adapters")
    begun, calls, manager = 0, 0, grammars.manager
    for seed in range(DRAWS):
        draw = random.Random(f"{choice}-{drafted}-{seed}")
        prompt = draw.choice(list(PROMPTS))
        request = asked(draw, "auto" if choice == "json" else choice)
        parser, options = parsers(request, prompt)
        constraint = request.structured_outputs
        if choice == "json":
            constraint = StructuredOutputsParams(json=drawn_object(draw))
        ids = prompt_ids(prompt)
        theirs = engine.KimiK2ParserReasoningAdapter(vllm_parsing.Tokenizer(), chat_template_kwargs=options)
        ours = grammars.request(constraint, ids, parser.reasoning_parser)
        stock = grammars.request(constraint, ids, theirs)
        sampler = Sampler(grammars, draw, vllm_parsing.TOKENIZER.encode, "look")
        for drafts, masks, tokens in steps(grammars, ours, sampler, drafted):
            assert manager.validate_tokens(stock, drafts) == drafts
            assert np.array_equal(grammars.masks(stock, drafts), masks)
            for spec in (drafts, tokens):
                assert manager._get_constraint_bounds(stock, spec) == manager._get_constraint_bounds(ours, spec)
            ended = stock.structured_output_request.reasoning_ended
            assert ours.structured_output_request.reasoning_ended == ended
            begun += not masks.all()
            grammars.accept(stock, tokens)
        assert ours.all_token_ids == stock.all_token_ids
        if choice == "json":
            continue
        *reply, last = ours.all_token_ids[len(ids) :]
        assert last == grammars.end, "the grammar has no end, or refused a token that its mask allowed"
        text, tokenizer = vllm_parsing.TOKENIZER.decode(reply), vllm_parsing.Tokenizer(prompt == "open")
        message = vllm_parsing.whole(text, request, tokenizer, **options)
        streamed, _ = vllm_parsing.stream(vllm_parsing.tokens_and_text(reply, draw), request, tokenizer, **options)
        assert streamed.tool_calls == message.tool_calls
        assert not any(marker in message.content + streamed.content for marker in (SECTION_BEGIN, CALL_BEGIN, CALL_END))
        if choice != "auto":
            _, marker, section = text.partition(SECTION_BEGIN)
            assert marker and SECTION_BEGIN not in STRING.sub("", section), text
            assert message.tool_calls, text
        schemas = {definition.function.name: definition.function.parameters for definition in request.tools}
        for call in message.tool_calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
            calls += 1
    assert begun > DRAWS
    assert calls >= DRAWS // 2 or choice == "json"


@pytest.mark.parametrize(
    ("schema", "held", "said"),
    [
        ({"type": "string", "minLength": 2}, {"type": "string"}, "strings of any length"),
        ({"type": "object", "properties": {"maxLength": {"const": {"minLength": 1}}}}, None, ""),
        ({"type": "integer", "multipleOf": 3}, True, "takes any JSON"),
    ],
)
def test_what_no_grammar_holds_is_said(
    schema: dict[str, Any], held: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """xgrammar's strings of bounded length have no escapes; other keywords vLLM itself names."""
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    definition = tool("look")
    definition["function"]["parameters"] = parameters
    for asked_twice in (False, True):
        request = vllm_parsing.request([definition], tool_choice="required")
        with caplog.at_level("WARNING", "vllm.kimi_k2"):
            parsers(request, "closed")
        assert (said in caplog.text) == (not asked_twice or not said)
        caplog.clear()
        tag = json.loads(request.structured_outputs.structural_tag)
        wanted = held if held is True else parameters | {"properties": {"a": held or schema}}
        assert f'"json_schema": {json.dumps(wanted)}' in json.dumps(tag)
        assert request.tools[0].function.parameters == parameters
