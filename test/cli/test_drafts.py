"""Drafts from the command line and from Python: the replies of without, and what was accepted."""

from __future__ import annotations

import json
import re
from pathlib import Path

from command import kimi

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.synthetic.draft import draft_fields, write_synthetic_head


def test_generate_with_drafts_says_the_same(fp8: Path, tmp_path: Path) -> None:
    write_synthetic_head(tmp_path, KimiK2Config.from_pretrained(fp8), "mla")
    given = "generate", fp8, "-p", "Hello", "--max-new-tokens", "8"
    plain, drafted = kimi(*given), kimi(*given, "--draft", str(tmp_path), "--draft-tokens", "2")
    assert plain.stdout == drafted.stdout
    assert "tokens a step, accepted by position" in drafted.stderr and "drafts" not in plain.stderr


def test_drafts_are_of_the_plain_model(fp8: Path) -> None:
    given = "generate", fp8, "-p", "Hello", "--draft"
    assert "--backend cpu or cuda" in kimi(*given, "ngram", "--backend", "neuron", "--on-cpu", status=2).output
    refused = kimi(*given, fp8, status=1)
    assert isinstance(refused.exception, ConfigError) and refused.exception.field == "architectures"


def test_compile_plans_the_heads_bytes(tmp_path: Path) -> None:
    fields = draft_fields(KimiK2Config.from_preset("kimi-k2-instruct-0905"), "mla", draft_vocab_size=32000)
    (tmp_path / "config.json").write_text(json.dumps(fields))

    def room(*draft: str) -> float:
        verdict = kimi("compile", "kimi-k2-instruct-0905", "--dry-run", *draft).stdout
        return float(re.findall(r"below ([\d.]+) GiB a rank", verdict)[0])

    assert room("--draft", str(tmp_path)) < room()
