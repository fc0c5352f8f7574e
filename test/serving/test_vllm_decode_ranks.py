"""Decode steps that two ranks replay: on both or on neither, and none waits for one that cannot record them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from plain_tokens import expected
from vllm_engine import requests, serve

pytestmark = pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="KIMI_K2_SLOW=1 starts two ranks for each")
REFUSALS = {"nothing": 0, "the trial": 1, "the second record": 3}


@pytest.mark.parametrize("refused", REFUSALS)
def test_two_ranks(refused: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The second cannot run a step, in the trial before its graphs are recorded or in a record; CUDA has a stand-in."""
    job, run = requests(seed=4), REFUSALS[refused]
    answer, log = serve(
        checkpoints["thinking"], "float32", job, tmp_path, timeout=240, tensor_parallel_size=2,
        worker_extension_cls="refused_step.Extension", environment={"KIMI_K2_TEST_REFUSED": str(run)},
    )  # fmt: skip
    assert answer["tokens"] == expected(checkpoints["thinking"], "float32", job)
    said = [line.partition("prepared by vLLM: no graph of them: ")[2] for line in log.splitlines()]
    assert sorted(filter(None, said)) == (["another rank cannot", "refused by the second rank"] if run else [])
    for line in ("decode steps of up to 4 requests follow each other on the GPU: 3 sizes", "a decode step is replayed"):
        assert log.count(line) == (0 if run else 2)
