"""Our parser of tool calls behind SGLang's own FunctionCallParser, registered as its loader of plugins does it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import Any

import engines
import pytest
from parser_cases import cut
from peer_cases import OF_PEERS
from vllm_parsing import ANY

from kimi_k2.serving.paged.support import PARSER
from kimi_k2.tokenization.deltas import Content, Delta, ToolCallArguments, ToolCallStart, collect

engines.need("sglang")

# What `sglang serve` and `python -m sglang.launch_server` do before their server starts.
COMMAND_LINE = """
import argparse
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(parser.parse_args(["--model-path", "model", "--tool-call-parser", "kimi_k2_stream"]).tool_call_parser)
"""


@pytest.fixture(scope="module")
def parser() -> Any:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.function_call.parser_names import TOOL_CALL_PARSER_NAMES

    from kimi_k2.serving.sglang.plugin import register

    register()
    register()
    assert TOOL_CALL_PARSER_NAMES.count(PARSER) == 1

    def new(tools: list[dict[str, Any]] | None) -> Any:
        return FunctionCallParser([Tool(**tool) for tool in tools or ANY], PARSER)

    return new


@pytest.mark.parametrize("name", OF_PEERS)
def test_peers_case(name: str, parser: Any) -> None:
    case = OF_PEERS[name]
    if case.reasoning or case.prefilled:
        pytest.skip("SGLang takes the reasoning away before")
    wanted = [(call[1], call[2]) for call in case.calls]
    content, calls = parser(case.tools).parse_non_stream(case.text)
    assert (content, [(call.name, call.parameters) for call in calls]) == (case.content, wanted)
    draw = random.Random(name)
    for _ in range(50):
        places = [draw.randrange(len(case.text) + 1) for _ in range(draw.choice((1, 2, 5, 30)))]
        used = parser(case.tools)
        parts = [used.parse_stream_chunk(piece) for piece in cut(case.text, places)] + [used.parse_stream_end()]
        changes: list[Delta] = []
        for text, items in parts:
            changes.append(Content(text))
            for item in items:
                if item.name is not None:
                    changes.append(ToolCallStart(item.tool_index, "", item.name))
                changes.append(ToolCallArguments(item.tool_index, item.parameters))
        message = collect(changes)
        assert (message.content, [(call.name, call.arguments) for call in message.tool_calls]) == (case.content, wanted)


@pytest.mark.parametrize("allowed", ["kimi_k2", "nobody"])
def test_command_line_knows_the_parser(allowed: str) -> None:
    """SGLANG_PLUGINS names the plugins that are loaded; without ours its command line refuses the name."""
    environment = {**os.environ, "SGLANG_PLUGINS": allowed}
    run = [sys.executable, "-c", COMMAND_LINE]
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, env=environment)
    if allowed == "kimi_k2":
        assert (done.returncode, done.stdout.split()[-1:]) == (0, ["kimi_k2_stream"]), done.stderr[-2000:]
    else:
        assert done.returncode == 2
        assert "invalid choice: 'kimi_k2_stream'" in done.stderr


def test_reasoning(parser: Any) -> None:
    """SGLang's own cases and reported failures of reasoning, by its ReasoningParser, whole and in random cuts."""
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    draw = random.Random(0)
    cases = [
        (False, "<think>Why.</think>So.", ("Why.", "So.")),
        (True, "Why.</think>So.", ("Why.", "So.")),
        (False, "So.", ("", "So.")),
        (False, "<think>Cut off", ("Cut off", "")),
        (False, "<think>Call<|tool_calls_section_begin|>x", ("Call", "<|tool_calls_section_begin|>x")),
        (False, "<think>a < b</think><|tool_call_begin|>f", ("a < b", "<|tool_call_begin|>f")),
    ]
    for name in ("kimi_k2", PARSER):
        for forced, text, wanted in cases:
            whole = ReasoningParser(name, force_reasoning=forced).parse_non_stream(text)
            assert (whole[0] or "", whole[1] or "") == wanted
            for stream_reasoning in (True, False):
                for _ in range(20):
                    made = ReasoningParser(name, stream_reasoning, forced)
                    places = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(6)))
                    parts = [*map(made.parse_stream_chunk, cut(text, places)), made.parse_stream_end()]
                    assert tuple("".join(one[which] or "" for one in parts) for which in (0, 1)) == wanted


def test_sglangs_names_are_ours(parser: Any) -> None:
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    for held in (FunctionCallParser.ToolCallParserEnum, ReasoningParser.DetectorMap):
        assert {held[name].__module__.split(".")[0] for name in ("kimi_k2", PARSER)} == {"kimi_k2"}
