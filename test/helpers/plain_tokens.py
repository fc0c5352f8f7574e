"""What a server is to answer: greedy tokens of the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.model.decoder import KimiK2ForCausalLM


def expected(directory: Path, dtype: str, job: list[dict[str, Any]]) -> list[list[int]]:
    """Greedy tokens of the plain model, each request alone."""
    model = KimiK2ForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    return [
        generate(model, [one["prompt"]], SamplingParams(one["new_tokens"], ignore_eos=True)).token_ids[0] for one in job
    ]
