"""VLLM_BATCH_INVARIANT with our model: a request's bits are the same alone and among others, in any parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import needs
import pytest
from plain_tokens import expected
from vllm_engine import OURS, requests, serve

needs.engine("vllm")

ON = {"VLLM_BATCH_INVARIANT": "1"}


@pytest.mark.parametrize(("name", "dtype"), [("fp8", "bfloat16"), ("thinking", "float32")])
def test_a_request_alone_and_among_others(name: str, dtype: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Prompts in parts of what 24 tokens a step leave, down to one, decodes beside them; or whole, and nobody else."""
    job = requests(seed=21, count=8 if dtype == "float32" else 4)
    job[0]["prompt"], job[1]["prompt"] = (job[0]["prompt"] * 25)[:25], job[1]["prompt"][:1]  # the first: 24, then one
    alone = [{**one, "arrival": 70 * number} for number, one in enumerate(job)]
    options: dict[str, Any] = {"max_num_batched_tokens": 24, "enable_prefix_caching": True}
    among, log = serve(checkpoints[name], dtype, job, tmp_path, environment=ON, parts=True, **options)
    assert OURS in log
    assert "no prefix caching, since VLLM_BATCH_INVARIANT is set" in log
    assert among["calls"]["next_step"]["plain"] > among["steps"] / 4  # decode steps are ours there too
    by_itself, _ = serve(checkpoints[name], dtype, alone, tmp_path, environment=ON)
    assert (among["tokens"], among["logprobs"]) == (by_itself["tokens"], by_itself["logprobs"])
    if dtype == "float32":
        assert among["tokens"] == expected(checkpoints[name], dtype, job)
