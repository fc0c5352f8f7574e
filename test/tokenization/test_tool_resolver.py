"""Which tool a call is for: by its id, or by the one schema that takes its arguments."""

from __future__ import annotations

import json
import re
import socket
import time
from typing import Any

import pytest
from parser_cases import as_tuples, call, check_cuts, section

from kimi_k2.tokenization.tool_resolver import ToolResolver, schema_problem


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
SILENT: list[dict[str, Any]] = [{"properties": {}}, {"properties": {}, "required": []}, {"type": "object"}, {}]
PATTERN = tool("f", {"required": ["q"], "properties": {"q": {"pattern": "^a+$"}}}), taking("g", "x")


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
        ("a:0", "{}", [taking("a:0"), taking("a")], "a"), ("functions.a: 0", "{}", [taking("a"), taking("b")], "a"),
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
        # One that says nothing tells no call from another tool's.
        *(("0", '{"q": "1"}', [tool("f", schema), taking("g", "q")], "g") for schema in SILENT),
        ("0", '{"q": "1"}', [tool("f", {"required": ["q"]}), taking("g", "x")], "f"),
        ("0", '{"q": "1"}', [tool("f", {"properties": {"q": {}}}), taking("g", "x")], "f"),
        ("0", '{"q": "aa"}', PATTERN, "f"), ("0", '{"q": "ab"}', PATTERN, None), ("0", '{"q": 3}', PATTERN, "f"),
        ("0", '{"q": "1"}', [tool("f", {"$defs": {"s": {"minLength": 2}}, "additionalProperties": {"$ref":
         "#/$defs/s"}}), taking("g", "q")], "g"),
        # A schema that cannot be used takes nothing.
        ("0", '{"q": "1"}', [tool("f", {"properties": {"x": {"type": "objekt"}}}), taking("g", "q")], "g"),
        ("0", '{"q": "1"}', [tool("f", {"$ref": "http://localhost:1/s"}), taking("g", "q")], "g"),
        ("0", '{"q": "1"}', [tool("f", {"properties": {"x": {"pattern": "("}}}), taking("g", "q")], "g"),
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


@pytest.mark.parametrize("name", ["get", "my-tool", "a.b", "list_2"])
def test_forms_of_an_id(name: str) -> None:
    """Of a name, and of the name as some clients must write it."""
    resolver = ToolResolver([taking("get"), taking("my-tool"), taking("a.b"), taking("list_2")])
    for form in ("functions.{}:3", " {}:0 ", "functions.{}", "{}", "functions.{}_1", "{}_12", "functions.{}:-1",
                 "{}.3", "functions_{1}_3"):  # fmt: skip
        resolved = resolver.by_id(form.format(name, re.sub("[^a-z0-9-]", "_", name)))
        assert resolved is not None and resolved.name == name, form
        assert resolver.by_id(form.format("undeclared", "undeclared")) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"q": {"pattern": "^(a+)+$"}}},
        {"$ref": "#/$defs/0", "$defs": {str(n): {"anyOf": [{"$ref": f"#/$defs/{n + 1}"}] * 2} for n in range(40)}
         | {"40": False}},
        {"$ref": "#"},
        {"type": [{"a": number} for number in range(20_000)]},
        {"anyOf": [{"type": "integer"}] * 20_000},  # each says what is wrong with all of it
    ],
)  # fmt: skip
def test_a_schema_that_would_run_for_minutes(schema: Any) -> None:
    """Schemas are the client's, and arguments what it made the model write: three tools, many calls."""
    begun, arguments = time.monotonic(), {"q": "a" * 100_000 + "!"}
    resolver = ToolResolver([tool(name, schema) for name in "abc"])
    for _ in range(100):
        assert resolver.by_arguments("0", json.dumps(arguments)) is None
    assert time.monotonic() - begun < 60
    assert "cannot be used" in str(schema_problem(arguments, schema))


@pytest.mark.parametrize(
    "schema",
    [
        5, [{}], {"$id": "http://[", "$ref": "x"},
        *({"$ref": "#/x", "x": target} for target in (5, {"type": "objekt"}, {"properties": {"q": {"minimum": "a"}}})),
    ],
)  # fmt: skip
def test_what_is_no_schema_takes_nothing(schema: Any) -> None:
    """Nothing checks what a reference leads to before it is used."""
    assert "cannot be used" in str(schema_problem({"q": 1}, schema))


def test_nothing_is_fetched_for_a_schema() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        schema = {"$ref": f"http://127.0.0.1:{server.getsockname()[1]}/s"}
        assert "cannot be used" in str(schema_problem({}, schema))
        with pytest.raises(BlockingIOError):
            server.accept()
