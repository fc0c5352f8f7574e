"""Ids that do not name their function: docs/parsers.md's table, where the request has one tool and where it has two."""

from __future__ import annotations

import pytest

from kimi_k2.tokenization.tool_calls import ToolNames


def named(*names: str) -> ToolNames:
    return ToolNames([{"type": "function", "function": {"name": name, "parameters": {}}} for name in names])


@pytest.mark.parametrize(
    "text",
    [
        "3", "call_6b0e7c24", "CALL_6B0E7C24", "toolu_01A", "chatcmpl-tool-9f", "fc_12",
        "6b0e7c24-31f0-4a3c-9d7e-0123456789ab", "6B0E7C24-31F0-4A3C-9D7E-0123456789AB",
        "6b0e7c2431f04a3c9d7e0123456789ab",
    ],
)  # fmt: skip
def test_a_foreign_id_means_the_only_tool(text: str) -> None:
    found = named("weather").from_id(text)
    assert found is not None
    assert (found.id, found.name) == (text, "weather")
    assert named("weather", "time").from_id(text) is None
    assert named().from_id(text) is None


@pytest.mark.parametrize("text", ["call", "caller", "call_me", "6b0e7c24", "\u0663", "weather report", "fcfc"])
def test_what_is_no_id_means_nothing(text: str) -> None:
    assert named("weather").from_id(text) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("functions.time:3", "time"), ("time:3", "time"), ("functions.a:b:0", "a:b"), ("functions_time_3", "time"),
        ("functions.time", "time"), ("time", "time"), ("functions.other:0", "other"),
    ],
)  # fmt: skip
def test_an_id_names_its_function(text: str, name: str) -> None:
    found = named("weather", "time").from_id(f" {text} ")
    assert found is not None
    assert (found.id, found.name) == (text, name)
