"""Requests at random times to an engine of vLLM's in a process of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("vllm_requests.py")
# vLLM's own attention on a CPU has these sizes alone; ours has any.
WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
OURS = "operations are ours, plain ones, since this is a CPU"


def requests(seed: int, count: int = 8) -> list[dict[str, Any]]:
    """Prompts of 3 to 90 tokens, 64 new ones each, arriving 0 to 9 engine steps apart; four at most run at once."""
    draw = random.Random(seed)
    arrival, made = 0, []
    for _ in range(count):
        prompt = [draw.randrange(512) for _ in range(draw.randint(3, 90))]
        made.append({"prompt": prompt, "new_tokens": 64, "arrival": arrival})
        arrival += draw.randint(0, 9)
    return made


def serve(
    directory: Path,
    dtype: str,
    job: list[dict[str, Any]],
    tmp_path: Path,
    *,
    plugins: str | None = None,
    pieces: int = 0,
    parts: bool = False,
    steps: int = 0,
    ahead: bool = False,
    swaps: Sequence[tuple[str, str]] = (),
    environment: dict[str, str] | None = None,
    timeout: float = 600,
    **options: Any,
) -> tuple[dict[str, Any], str]:
    """What vllm_requests.py answers, and its log."""
    asked, result = tmp_path / "asked.json", tmp_path / "result.json"
    about = {"dtype": dtype, "requests": job, "options": options, "pieces": pieces, "parts": parts, "swaps": swaps}
    about |= {"steps": steps, "ahead": ahead}
    asked.write_text(json.dumps(about))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **(environment or {})}
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    engine = subprocess.Popen(
        [sys.executable, str(WORKER), str(directory), str(asked), str(result)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True,
    )  # fmt: skip
    try:
        log = "".join(engine.communicate(timeout=timeout))
    finally:  # ranks that wait for each other outlive the engine
        with suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
    assert engine.returncode == 0, log[-8000:]
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer, log
