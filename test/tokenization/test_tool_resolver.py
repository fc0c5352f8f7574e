"""Which tool a call is for: by its id, or by the one schema that takes its arguments, beside jsonschema."""

from __future__ import annotations

import json
import os
import random
import re
import time
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from parser_cases import as_tuples, call, check_cuts, section

from kimi_k2.tokenization.tool_resolver import ToolResolver, schema_problem

DRAWS = int(os.environ.get("KIMI_K2_DRAWS", "5000"))


def tool(name: str, schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def taking(name: str, required: str = "", optional: str = "", **more: Any) -> dict[str, Any]:
    properties = {field: {"type": "string"} for field in (*required.split(), *optional.split())}
    return tool(name, {"type": "object", "properties": properties, "required": required.split(), **more})


CONST = (
    tool("delete", {"type": "object", "properties": {"action": {"const": "delete"}}, "required": ["action"]}),
    tool("dispatch", {"type": "object", "additionalProperties": {"type": "string"}}),
)
SEVEN = (
    taking("Read", "file_path", "offset limit"),
    taking("Write", "file_path content"),
    taking("Edit", "file_path old_string new_string"),
    taking("Glob", "pattern", "path"),
    taking("Grep", "pattern", "path output_mode"),
    tool(
        "LS",
        {
            "type": "object",
            "properties": {"path": {"type": "string"}, "ignore": {"type": "array"}},
            "required": ["path"],
        },
    ),
    taking("Ping"),
)
ANY_OF = (
    tool(
        "locate",
        {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
            "anyOf": [{"required": ["city"]}, {"required": ["zip"]}],
        },
    ),
    taking("query", "q"),
)
TWO = taking("ReadFile", "path"), taking("get_weather", "city", "unit")
CITY = '{"city": "x"}'


@pytest.mark.parametrize(
    ("identifier", "arguments", "tools", "name"),
    [
        ("0", '{"action": "read"}', CONST, "dispatch"),
        ("0", '{"action": 5}', CONST, None),
        ("0", '{"content": "rm"}', SEVEN, None),
        ("0", '{"old_string": "a", "new_string": "b"}', SEVEN, None),
        ("0", '{"file_path": "/x"}', SEVEN, "Read"),
        ("0", '{"path": "/x"}', SEVEN, "LS"),
        ("0", "{}", SEVEN, "Ping"),
        ("0", '{"zip": "94110"}', ANY_OF, "locate"),
        ("tooltoolu_01KPuJ9wUyn6EMNvM6D3vSWE", '{"path": "/a.py"}', TWO, "ReadFile"),
        ("weird@id", '{"path": "x"}', [taking("search", "path")], "search"),
        ("functions.get_weather_0", CITY, TWO, "get_weather"),
        ("get_weather_0", CITY, TWO, "get_weather"),
        ("functions.get_weather:-1", CITY, TWO, "get_weather"),
        ("functions.rm:0", '{"target": "/"}', TWO, None),
        ("functions.rm:0", CITY, TWO, "get_weather"),
        ("functions.rm:0", "{}", [], None),
        # Names that look like another's id.
        ("functions.a:b:0", "{}", [taking("a:b"), taking("a")], "a:b"),
        ("search_2", "{}", [taking("search"), taking("search_2")], "search_2"),
        ("search_2", "{}", [taking("search"), taking("other")], "search"),
        ("functions_my_tool_3", "{}", [taking("my.tool"), taking("x", "y")], "my.tool"),
        ("functions_my_tool_3", "[]", [taking("my.tool"), taking("my:tool")], None),
        ("functions.x:0", "{}", [taking("functions.x"), taking("x")], "x"),
        # What is no JSON object fits no tool; a boolean schema takes all or nothing.
        ("0", '{"city": NaN}', [tool("f", True)], None),
        ("0", '["city"]', [tool("f", True)], None),
        ("0", '{"z": 1}', [tool("f", True), tool("g", False)], "f"),
        ("0", '{"z": 1}', [tool("f", True), tool("g", True)], None),
        ("0", '{"q": "1"}', [tool("f", None), taking("g", "q")], "g"),
        # A schema that cannot be used takes nothing.
        ("0", '{"q": "1"}', [tool("f", {"type": "objekt"}), taking("g", "q")], "g"),
        ("0", '{"q": "1"}', [tool("f", {"$ref": "http://localhost:1/s"}), taking("g", "q")], "g"),
        ("0", '{"q": "1"}', [tool("f", {"properties": {"q": {"pattern": "("}}}), taking("g", "q")], "g"),
    ],
)  # fmt: skip
def test_whose_call_it_is(identifier: str, arguments: str, tools: list[dict[str, Any]], name: str | None) -> None:
    message = check_cuts(section(call(identifier, arguments)), 5, tools=tools)
    if name is None:
        assert (message.content, message.tool_calls) == (identifier + arguments, [])
    else:
        assert as_tuples(message) == [(identifier.strip(), name, arguments)]


def test_without_definitions_the_trained_forms_tell() -> None:
    for identifier, name in (("functions.a.b:3", "a.b"), ("a:0", "a"), ("functions_a_3", "a")):
        found = ToolResolver(None).by_id(identifier)
        assert found is not None and found.name == name
    assert ToolResolver(None).by_id("a") is None and not ToolResolver(None).arguments_tell
    assert ToolResolver([]).by_id("functions.a:0") is None


# Of a name, and of the name as some clients must write it.
ID_FORMS = ("functions.{}:3", " {}:0 ", "functions.{}", "{}", "functions.{}_1", "{}_12", "functions.{}:-1", "{}.3",
            "functions_{1}_3")  # fmt: skip
# Schemas that say nothing, and so tell no call from another tool's.
SILENT: list[dict[str, Any]] = [
    {"properties": {}}, {"properties": {}, "required": []}, {"type": "object", "properties": {}},
    {"type": "object", "properties": {}, "required": []},
]  # fmt: skip
DEPTH = 2
PLAIN: list[dict[str, Any]] = [
    {"type": "string"}, {"type": "integer"}, {"enum": ["a", 1]}, {"const": "a"}, {"minLength": 2}, {"minimum": 2},
    {"type": ["string", "null"]}, {"pattern": "^a+$"},
]  # fmt: skip
WORDS = ("city", "path", "q", "n")


def drawn_schema(draw: random.Random, depth: int = DEPTH) -> Any:
    kind = draw.randrange(10)
    if kind == 0:
        return draw.random() < 0.7
    if depth == 0 or kind == 1:
        return draw.choice(PLAIN)
    if kind < 4:
        return {draw.choice(("anyOf", "oneOf", "allOf")): [drawn_schema(draw, depth - 1) for _ in range(2)]}
    if kind == 4:
        return {"not": drawn_schema(draw, depth - 1)}
    schema: dict[str, Any] = {"type": "object"} if draw.random() < 0.8 else {}
    schema["properties"] = {word: drawn_schema(draw, depth - 1) for word in WORDS if draw.random() < 0.5}
    if draw.random() < 0.7:
        schema["required"] = [word for word in WORDS if draw.random() < 0.3]
    if draw.random() < 0.3:
        schema["additionalProperties"] = drawn_schema(draw, depth - 1)
    if depth == DEPTH and draw.random() < 0.2:
        schema |= {"$defs": {"s": {"type": "string"}}, "additionalProperties": {"$ref": "#/$defs/s"}}
    if draw.random() < 0.1:
        schema["dependentRequired"] = {"q": ["n"]}
    return schema


def drawn_value(draw: random.Random) -> Any:
    return draw.choice(["a", "aa", "b", 1, 3, 2.0, None, True, [], {"city": "a"}, ""])


def test_drawn_schemas_beside_jsonschema() -> None:
    """Arguments choose a tool where jsonschema takes them for it alone; an id that names one is that one."""
    draw, chosen = random.Random(41), 0
    for number in range(DRAWS):
        names = draw.sample(["get", "put", "my-tool", "a.b", "list_2"], draw.randrange(1, 5))
        schemas = {name: drawn_schema(draw) for name in names}
        arguments = {word: drawn_value(draw) for word in WORDS if draw.random() < 0.4}
        resolver = ToolResolver([tool(*each) for each in schemas.items()])
        takes = [
            name
            for name, schema in schemas.items()
            if Draft202012Validator(schema).is_valid(arguments)
            and not (arguments and len(names) > 1 and schema in SILENT)
        ]
        found = resolver.by_arguments(f"call_{number}", json.dumps(arguments))
        assert (found and found.name) == (takes[0] if len(takes) == 1 else None), (schemas, arguments)
        chosen += found is not None
        form = draw.choice(ID_FORMS)
        name = draw.choice(names)
        resolved = resolver.by_id(form.format(name, re.sub("[^a-z0-9-]", "_", name)))
        assert resolved is not None and resolved.name == name, (form, names)
        assert resolver.by_id(form.format("undeclared", "undeclared")) is None
    assert chosen > DRAWS / 10


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"q": {"pattern": "^(a+)+$"}}},
        {"$ref": "#/$defs/0", "$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)}
         | {"40": False}},
        {"$ref": "#"},
    ],
)  # fmt: skip
def test_a_schema_that_would_run_for_minutes(schema: Any) -> None:
    """Schemas are the client's, and arguments what it made the model write."""
    begun = time.process_time()
    assert schema_problem({"q": "a" * 60 + "!"}, schema) is not None
    assert time.process_time() - begun < 20
