"""How many of our files a reader has to open who follows a request through vLLM's plugin on a CPU."""

from __future__ import annotations

from pathlib import Path

import needs
import pytest
import vllm_engine
from plain_tokens import expected

needs.engine("vllm")


def test_files_of_a_request(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "WORKER", Path(__file__).with_name("traced_requests.py"))
    job = vllm_engine.requests(seed=3, count=2)
    answer, log = vllm_engine.serve(checkpoints["bf16"], "float32", job, tmp_path)
    assert vllm_engine.OURS in log
    assert answer["tokens"] == expected(checkpoints["bf16"], "float32", job)
    files = answer["files"]
    assert {"serving/vllm/model.py", "serving/paged/model.py", "engine/layer_step.py"} <= set(files)
    assert len(files) <= 21, files  # one request after another, without LoRA, drafts and experts that move
