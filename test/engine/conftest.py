"""The model that most tests of the engine run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k2.model.decoder import KimiK2ForCausalLM


@pytest.fixture(scope="session")
def model(fp8: Path) -> KimiK2ForCausalLM:
    return KimiK2ForCausalLM.from_pretrained(fp8)
