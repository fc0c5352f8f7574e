"""The contract on vLLM's own CPU build: its plug-ins, configuration, registry and groups; the platform stands in.

The line's worker and runner are read, not run: `line.Runner` plays them.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import engines
import line
import pytest
from in_vllm import write_platform
from processes import run_together

engines.need("vllm")

WORKER = Path(__file__).with_name("in_vllm.py")


@pytest.mark.parametrize(
    ("name", "held"), [("fp8", "blockwise"), ("thinking", "bf16"), ("k2.5", "bf16"), ("modelopt", "bf16")]
)
def test_vllm_takes_the_model_and_its_groups_serve_it(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, held: str
) -> None:
    """TP2 x EP2 in two processes on gloo; all three of our entry points are there, and each keeps to its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = tmp_path / "job.json"
    options = {"ep_degree": 2, "quantization": held}
    wanted = {"model": str(checkpoints[name]), "ranks": 2, "segment": 16, "port": port, "neuron_config": options}
    job.write_text(json.dumps(wanted))
    write_platform(tmp_path / "line")
    path = os.pathsep.join([str(tmp_path / "line"), os.environ.get("PYTHONPATH", "")])
    for variable, value in {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}.items():
        monkeypatch.setenv(variable, value)
    run_together([[sys.executable, WORKER, job, rank] for rank in range(2)], timeout=300)
    tokens = line.plain(checkpoints[name])[0]
    for rank in range(2):
        answer = json.loads(job.with_suffix(f".{rank}").read_text())
        assert answer["tokens"] == tokens
        assert answer["platform"] == "NeuronPlatform"
        assert answer["worker"] == "vllm_neuron.vllm.worker.neuron_worker.NeuronWorker"
        assert answer["class"] == "kimi_k2.neuron.torch_native.model.KimiK2ForVllmNeuron"
        assert answer["groups"] == "GroupCoordinator"
