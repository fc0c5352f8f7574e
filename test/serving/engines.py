"""Engines in processes of their own: requests at random times to vLLM's, servers, and what of them is there."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_k2.kernels.common.build import find_nvcc

WORKER = Path(__file__).with_name("vllm_requests.py")
# vLLM's own attention on a CPU has these sizes alone; ours has any.
WIDE = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
OURS = "operations are ours"
# vLLM's own model. DeepGEMM's warm-up would go through all sizes one by one, a second each.
STOCK = {"VLLM_PLUGINS": "kimi_k2_parsers", "VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
ON_CPU = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
STARTS_WITHIN = 300.0  # seconds
ON_GPU = torch.cuda.is_available()
# A GPU may be shared: vLLM is told how much to take, so it does not measure what others take and give back.
DEVICE = {
    False: ("--dtype", "float32", "--enforce-eager"),
    True: ("--dtype", "bfloat16", "--kv-cache-memory-bytes", "1000000000", "--gpu-memory-utilization", "0.1"),
}
# What vLLM's sampler must know of tokens made before, of its own random numbers, of the batch.
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 5, "logprobs": 4},
    {"temperature": 0, "repetition_penalty": 1.4, "min_tokens": 20, "stop_token_ids": list(range(200))},
    {"temperature": 0.6, "min_p": 0.05, "seed": 8, "logit_bias": {7: 4.0, 11: -100.0}},
    {"temperature": 0, "allowed_token_ids": list(range(30, 90))},
]
SLOW = pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="slow: KIMI_K2_SLOW=1")
PROCESSORS = ["in_workers:Forced"]  # `logits_processors` of an engine whose process finds in_workers.py

Served = tuple[dict[str, Any], str]


def need(name: str) -> None:
    """Skip the module of tests that calls this, where an engine is not installed."""
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name} (docs/engines.md): not importable here: {name}", allow_module_level=True)


def on_hoppers(count: int = 1) -> list[pytest.MarkDecorator]:
    """Marks of tests that need so many Hopper GPUs, and what builds kernels for them."""
    there = torch.cuda.device_count() >= count and torch.cuda.get_device_capability() == (9, 0)
    there = there and find_nvcc() is not None
    return [pytest.mark.gpu, pytest.mark.skipif(not there, reason=f"needs {count} Hopper GPUs and nvcc")]


def forced(tokens: list[int]) -> dict[str, Any]:
    """A request that answers with these tokens; their log-probabilities are those before any processor."""
    return {"extra_args": {"forced": tokens}}


def requests(seed: float | str, count: int = 8, new_tokens: int = 64, longest: int = 90) -> list[dict[str, Any]]:
    """Prompts of 3 tokens and more, arriving 0 to 9 engine steps apart; four at most run at once."""
    draw = random.Random(seed)
    arrival, made = 0, []
    for _ in range(count):
        prompt = [draw.randrange(512) for _ in range(draw.randint(3, longest))]
        made.append({"prompt": prompt, "new_tokens": new_tokens, "arrival": arrival})
        arrival += draw.randint(0, 9)
    return made


def serve(
    directory: Path,
    dtype: str,
    job: list[Any],
    tmp_path: Path,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 600,
    told: Mapping[str, Any] | None = None,
    worker: Path = WORKER,
    **options: Any,
) -> Served:
    """What a worker answers, and its log.

    Args:
        directory: the model's.
        dtype: of what it computes in.
        job: requests.
        tmp_path: for files.
        environment: added to this process's.
        timeout: seconds.
        told: what the worker itself is told.
        worker: vllm_requests.py, or SGLang's, whose processes may end by a signal.
        options: of the engine.
    """
    asked, result, log = (tmp_path / name for name in ("asked.json", "result.json", "log"))
    asked.write_text(json.dumps({"dtype": dtype, "requests": job, "options": options, **(told or {})}))
    with log.open("w") as written:
        engine = subprocess.Popen(
            [sys.executable, str(worker), str(directory), str(asked), str(result)],
            stdout=written, stderr=written, start_new_session=True, env={**os.environ, **ON_CPU, **(environment or {})},
        )  # fmt: skip
    try:
        engine.wait(timeout)
    finally:  # ranks that wait for each other outlive the engine
        end(engine)
    assert result.exists() and (worker != WORKER or engine.returncode == 0), log.read_text()[-8000:]
    answer: dict[str, Any] = json.loads(result.read_text())
    return answer, log.read_text()


def serve_replicas(
    directory: Path, dtype: str, jobs: Sequence[list[dict[str, Any]]], out: Path, environment: Any, **options: Any
) -> list[Served]:
    """Likewise by data-parallel ranks, each of which has requests of its own; for one it is `serve`."""
    place = {"SIZE": len(jobs), "MASTER_PORT": free_port(), "MASTER_IP": "127.0.0.1"}

    def one(number: int) -> Served:
        named = {**place, "RANK": number, "RANK_LOCAL": number} if len(jobs) > 1 else {}
        more = {f"VLLM_DP_{name}": str(value) for name, value in named.items()}
        folder = out / f"replica{number}"
        folder.mkdir(parents=True)
        return serve(directory, dtype, jobs[number], folder, environment={**environment, **more}, **options)

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(one, range(len(jobs))))


def end(process: subprocess.Popen[Any], *signals: signal.Signals) -> None:
    """Send all processes of its session each of the signals, SIGKILL at last, until it has ended."""
    for ending in (*signals, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, ending)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def started(
    command: Sequence[str], server_url: str, health: str, log: Path, environment: Mapping[str, str]
) -> Iterator[str]:
    """The base URL of a server, waited for until it answers at `health`, and ended with all its processes.

    Raises:
        RuntimeError: it ended, or did not come up; with the end of its log.
    """
    with log.open("w") as written:
        server = subprocess.Popen(command, stdout=written, stderr=written, env=environment, start_new_session=True)
    limit, up = time.monotonic() + STARTS_WITHIN, False
    try:
        while not up:
            if server.poll() is not None or time.monotonic() > limit:
                raise RuntimeError(f"no server: {log.read_text()[-4000:]}")
            try:
                with urllib.request.urlopen(server_url + health, timeout=2):
                    up = True
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        yield f"{server_url}/v1"
    finally:
        end(server, signal.SIGINT)


def serving(model: Path, log: Path, *options: str) -> AbstractContextManager[str]:
    """The base URL of a `vllm serve` of `model`, on a GPU where there is one, with our plugin and parsers."""
    port = free_port()
    command = [
        # What `vllm serve` runs; vllm-cpu's own command looks for a distribution called vllm.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", "kimi", "--max-model-len", "2048", "--max-num-seqs", "8",
        "--enable-auto-tool-choice", "--tool-call-parser", "kimi_k2_stream", "--reasoning-parser", "kimi_k2_stream",
        *DEVICE[ON_GPU], *options,
    ]  # fmt: skip
    return started(command, f"http://127.0.0.1:{port}", "/health", log, {**os.environ, **ON_CPU})
