"""Tool declarations: compact JSON with sorted keys, and the TypeScript namespace of K2.5 and K2.6."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parser_cases import apply_chat_template

from kimi_k2.errors import TokenizerError
from kimi_k2.tokenization.tool_declaration import checked_tools, typescript_declaration


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


BOOK = tool(
    "book_train",
    description="Book a seat.\n\nAsk before paying.",
    parameters={
        "type": "object",
        "required": ["to", "seats"],
        "properties": {
            "to": {"type": "string", "description": "Station", "minLength": 2, "maxLength": 40},
            "seats": {"type": "integer", "minimum": 1, "maximum": 9},
            "class": {"enum": ["first", "second"], "default": "second", "description": "Comfort"},
            "quiet": {"type": "boolean", "default": False},
            "via": {"type": "array", "minItems": 1, "items": {"type": "string", "description": "Stop"}},
            "tags": {"type": "array", "items": {"type": ["string", "null"]}},
            "price": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "rider": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                "required": ["name"],
                "additionalProperties": False,
            },
        },
    },
)
WALK = tool(
    "walk",
    description="Visit a tree.",
    parameters={
        "type": "object",
        "$defs": {
            "Leaf": {
                "type": "object",
                "description": "An end",
                "properties": {"value": {"type": "number"}},
                "additionalProperties": {"type": "string"},
            }
        },
        "properties": {"leaf": {"$ref": "#/$defs/Leaf"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    },
)

# What the encoder published with K2.5 prints for these three tools.
PUBLISHED = """# Tools

## functions
namespace functions {
// Book a seat.

// Ask before paying.
type book_train = (_: {
  // maximum: 9, minimum: 1
  seats: number,
  // Station
  // maxLength: 40, minLength: 2
  to: string,
  // Comfort
  // Default: "second"
  class?: "first" | "second",
  price?: number | null,
  // Default: False
  quiet?: boolean,
  rider?: {
    name: string,
    age?: number,
    [k: string]: never
  },
  tags?: Array<string | null>,
  // minItems: 1
  via?: Array<
    // Stop
    string
  >
}) => any;
interface parameters {
  children?: Array<parameters>,
  leaf?: Leaf
}
// An end
interface Leaf {
  value?: number,
  [k: string]: string
}
// Visit a tree.
type walk = (_: parameters) => any;
type ping = (_: {}) => any;
}
"""


def test_published_typescript() -> None:
    assert typescript_declaration(checked_tools([BOOK, WALK, tool("ping")])) == PUBLISHED


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": []}, {"$ref": "#/$defs/Missing"}, {"$ref": "http://x"}, {"type": ["string", "date"]},
        {"enum": ["a", 1], "type": "string"}, {"enum": [1], "type": ["string", "integer", "null"]}, "string", 3,
        {"type": {}}, {"anyOf": 3}, {"enum": 3}, {"$ref": 3}, {"type": ["string", {}]}, {"type": "array", "items": [1]},
        {"description": 3}, {"type": "object", "additionalProperties": 3},
    ],
)  # fmt: skip
def test_schemas_without_a_typescript_form(schema: Any) -> None:
    """A schema is the client's; such tools are shown in JSON, as the published tokenizers do."""
    tools = [tool("f", parameters={"type": "object", "properties": {"a": schema}})]
    assert schema == {"description": 3} or typescript_declaration(checked_tools(tools)) is None
    for parameters in (tools[0]["function"]["parameters"], {"properties": schema}, {"$defs": schema}):
        told = [tool("f", parameters=parameters)]
        text = apply_chat_template([{"role": "user", "content": "U"}], tools=told, style="k2.5")
        assert text.startswith("<|im_system|>tool_declare<|im_middle|>")


def test_other_kinds_of_tools_are_not_declared_in_typescript() -> None:
    assert typescript_declaration(checked_tools([{"type": "_plugin"}])) is None
    declared = typescript_declaration(checked_tools([{"type": "_plugin"}, tool("f")]))
    assert declared is not None
    assert declared.count("type ") == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4))
@settings(max_examples=100, deadline=None)
def test_keys_are_sorted_at_every_level(extra: dict[str, Any]) -> None:
    tools = [tool("f", extra=extra)]
    assert json.dumps(checked_tools(tools)) == json.dumps(tools, sort_keys=True)


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ("f", "tools: expected a list"),
        ({"type": "function"}, "tools: expected a list"),
        ([3], "tool 0: expected an object"),
        ([tool("f"), {"type": "function"}], "tool 1: field 'function.name'"),
        ([{"function": {"name": ""}}], "tool 0: field 'function.name'"),
        ([tool("f", parameters=[1])], "tool 0: field 'function.parameters'"),
        ([{"type": "x", 1: 2}], "tools: expected text"),
        ([tool("f", parameters={"a": {1, 2}})], "JSON"),
        ([tool("f", x=object())], "JSON"),
    ],
)
def test_malformed_tools(tools: Any, says: str) -> None:
    with pytest.raises(TokenizerError, match=says):
        apply_chat_template([], tools=tools)
