"""scripts/quality.py whole, on a checkpoint that answers "=7" to questions and calls a tool in chats; beside stock."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import engines
import pytest
from engines import ON_CPU, WIDE
from scripted import SCRIPT, write_scripted_checkpoint

from kimi_k2.tokenization.special_tokens import IM_END, IM_MIDDLE

engines.need("vllm")
if shutil.which("lm_eval") is None:
    pytest.skip("needs lm_eval (docs/engines.md)", allow_module_level=True)

ROOT = Path(__file__).parents[2]
SEVENS = "0.6000"  # of the questions in sums.jsonl, those whose answer is 7


def test_every_field_of_both(tmp_path: Path) -> None:
    """What is scored is what the model writes; the needle it cannot know."""
    write_scripted_checkpoint(tmp_path / "model", {f"=7{IM_END}": ("?",), SCRIPT: (IM_MIDDLE,)}, **WIDE)
    asked = "--tasks kimi_k2_sums kimi_k2_texts --include-path test/serving/lm_eval --longest 2048 --call-tokens 64"
    asked += " --needle 400 900 --tables 64/8 --concurrency 2 -- --dtype float32 --enforce-eager --max-model-len 2048"
    command = [sys.executable, "scripts/quality.py", str(tmp_path / "model"), str(tmp_path / "out"), *asked.split()]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    environment = {**os.environ, **ON_CPU, **offline}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    figures = json.loads((tmp_path / "out/report.json").read_text())
    report = (tmp_path / "out/report.md").read_text()
    assert figures["stock"].keys() == figures["ours"].keys()
    for who, of in (("stock", "vLLM's"), ("ours", "ours")):
        found = figures[who]
        assert found["operations"] == of and "ended by" not in found, found
        assert found["kimi_k2_sums exact_match,strict-match"] == SEVENS
        assert float(found["kimi_k2_texts word_perplexity"]) > float(found["kimi_k2_texts byte_perplexity"]) > 1
        assert (
            found["requests"] == found["count_finish_reason_tool_calls"] == found["count_successful_tool_call"] == "4"
        )
        assert (found["failures"], found["schema_accuracy"]) == ("0", "1.000")
        assert found["needle at 400 tokens"] == found["needle at 900 tokens"] == "0 of 3"
        assert "nan" not in " ".join(found.values())
    for what in figures["ours"].keys() - {"operations", "64/8, 2 at once: TTFT, TPOT, tokens/s"}:
        assert figures["ours"][what] == figures["stock"][what]
    assert "not done" not in report and "F1 of answering by calls, of ours with stock as the reference: 1.0" in report
