"""vLLM's and SGLang's own cases, and reports, each cut at random places: no character lost, no markup in content.

KIMI_K2_DRAWS sets the number of ways to cut each case; 1000 for the full check.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from parser_cases import as_tuples, check_cuts
from peer_cases import REPORTED, SGLANG, VLLM, Case

CUTS = int(os.environ.get("KIMI_K2_DRAWS", "100"))
DOCUMENT = Path(__file__).parents[2] / "docs" / "parsers.md"
CASES = [
    (f"{engine} {case.name}", case)
    for engine, cases in (("vllm", VLLM), ("sglang", SGLANG), ("reported", REPORTED))
    for case in cases
]


@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_peers_case(case: Case) -> None:
    message = check_cuts(case.text, CUTS, tools=case.tools, prefilled=case.prefilled)
    assert (message.reasoning_content, message.content, as_tuples(message)) == (
        case.reasoning,
        case.content,
        case.calls,
    )
    assert message.finish_reason == (case.finish_reason or ("tool_calls" if case.calls else "stop"))


def test_each_difference_is_documented() -> None:
    rows = set(re.findall(r"^\| ([^|]+?) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE))
    differences = {case.difference for _, case in CASES if case.difference}
    assert differences <= rows
    listed = DOCUMENT.read_text(encoding="utf-8").split("## Differences")[1]
    assert {row for row in rows if f"| {row} |" in listed} - {"what", "---"} == differences
