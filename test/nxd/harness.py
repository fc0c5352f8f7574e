"""Runs worker.py on as many processes as there are ranks, or on executed graphs; the plain model beside it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import environment
import pytest
import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import Router
from kimi_k2.plan.deployment import Deployment

WORKER = Path(__file__).with_name("worker.py")
# Degrees of tensor and expert parallelism.
LAYOUTS = {"TP1": (1, 1), "TP2": (2, 1), "TP4": (4, 1), "EP2": (1, 2), "TP2xEP2": (2, 2)}
TOLERANCE = 2e-5  # of logits in float32
# What would take the default run beyond ten minutes on two cores.
SLOW = pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="slow: runs with KIMI_K2_SLOW=1")
DECODE_STEPS = 16
SEQ_LEN = 48
LENGTHS = {1: [24], 4: [24, 7, 1, 13]}


def neuron_config(tp: int, ep: int, batch: int, **options: Any) -> dict[str, Any]:
    """Arguments of KimiK2NeuronConfig for `tp` x `ep` ranks (attention is split over all of them).

    A block of 16 tokens takes prefill through blocks.
    """
    length = options.pop("seq_len", SEQ_LEN)
    return {
        "tp_degree": tp * ep,
        "moe_tp_degree": tp,
        "moe_ep_degree": ep,
        "batch_size": batch,
        "seq_len": length,
        "max_context_length": length,
        "n_positions": length,
        "blockwise_matmul_config": {"block_size": 16},
        **options,
    }


def sequences(batch: int, vocab: int, steps: int = DECODE_STEPS) -> dict[str, list[list[int]]]:
    """Prompts of ragged length and the tokens that decode is fed."""
    generator = torch.Generator().manual_seed(batch)

    def draw(count: int) -> list[int]:
        return torch.randint(0, vocab, (count,), generator=generator).tolist()

    prompts = [draw(length) for length in LENGTHS[batch]]
    return {"prompts": prompts, "forced": [draw(steps) for _ in prompts]}


def draw_cases(lengths: tuple[int, ...], steps: int, seed: int) -> list[dict[str, Any]]:
    """One sequence a prompt length, with the tokens that decode is fed."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(0, 512, (count,), generator=generator).tolist()

    return [{"prompts": [draw(length)], "forced": [draw(steps)]} for length in lengths]


def distances(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative L2 distance of each row."""
    out: torch.Tensor = ((found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).squeeze()
    return out


def refused_field(options: dict[str, Any], model: KimiK2Config | None = None) -> str | None:
    """The field that the error of a configuration names: of options, and of a model where there is one."""
    module = environment.contrib("config")
    with pytest.raises(ConfigError) as caught:
        neuron = module.KimiK2NeuronConfig(on_cpu=True, torch_dtype=torch.float32, **options)
        module.KimiK2InferenceConfig(neuron, load_config=module.load_kimi_config(model))
    return caught.value.field


def launch(job: dict[str, Any], directory: Path, worker: Path = WORKER, timeout: float = 240) -> Any:
    """Run the job on all its ranks; returns what rank 0 saved. A failing rank's error is the test's message."""
    world = job["neuron_config"]["tp_degree"]
    directory.mkdir(parents=True, exist_ok=True)
    output, path = directory / "output.pt", directory / "job.json"
    output.unlink(missing_ok=True)
    path.write_text(json.dumps({**job, "checkpoint": str(job["checkpoint"]), "output": str(output)}))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(world):
        env = {
            **os.environ,
            "WORLD_SIZE": str(world),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        log = (directory / f"rank{rank}.log").open("w")
        processes.append(subprocess.Popen([sys.executable, str(worker), str(path)], env=env, stdout=log, stderr=log))
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        logs = "\n".join((directory / f"rank{rank}.log").read_text()[-3000:] for rank in range(world))
        raise AssertionError(f"ranks exited with {codes}:\n{logs}")
    return torch.load(output)


def execute(job: dict[str, Any], directory: Path, worker: Path = WORKER, timeout: float = 400) -> Any:
    """Run the job on XLA's CPU from its lowered graphs, all ranks in one process.

    Returns, of worker.py:
        logits: one tensor a case, as `launch` gives them; graphs: stage, bucket, HLO and parameter types of each graph;
        calls: stage and bucket of each step; loaded: dtypes of the decode module.
    """
    directory.mkdir(parents=True, exist_ok=True)
    output, path = directory / "output.pt", directory / "job.json"
    path.write_text(json.dumps({**job, "checkpoint": str(job["checkpoint"]), "output": str(output)}))
    run_executed([str(worker), str(path)], job["neuron_config"]["tp_degree"], timeout)
    return torch.load(output, weights_only=False)


WAYS = {"CPU mode": launch, "executed": execute}


def check(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Logits against the expected ones; the largest difference is printed, and the same tokens are the likeliest."""
    print(f"\n{name}: max |difference| {float((found - expected).abs().max()):.1e}")
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def run_executed(command: list[str], ranks: int, timeout: float = 400) -> None:
    """Run a script that executes lowered graphs on `ranks` CPU devices; its error is the test's message."""
    if importlib.util.find_spec("jax") is None:
        pytest.skip("needs jax (XLA for the CPU) to execute the graphs")
    env = {name: value for name, value in os.environ.items() if name != "NXD_CPU_MODE"}
    # Without LLVM's slow passes: compiling takes longer than running.
    flags = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
    devices = f"--xla_force_host_platform_device_count={ranks}"
    env["XLA_FLAGS"] = " ".join([devices, *flags])
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]


def counts_of(worker: Path, *arguments: str | Path | int) -> dict[str, Any]:
    """What a worker that lowers a graph prints, in a process of its own: CPU mode and lowering exclude each other."""
    command = [sys.executable, str(worker), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    counts: dict[str, Any] = json.loads(re.findall(r"(?m)^COUNTS (.*)$", done.stdout)[0])
    return counts


def torchrun(ranks: int) -> list[str]:
    """The beginning of a Python command line on as many ranks."""
    if ranks == 1:
        return [sys.executable]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, "--no-python", sys.executable]


def bf16_preset(name: str, directory: Path) -> str:
    """A file with the preset whose routed experts are not quantized, so that the plain model is to be met exactly."""
    path = directory / f"{name}-bf16.yaml"
    tiles = "" if Deployment.load(name).neuron_config.decode == "xla" else "_tiles"
    path.write_text(f"like: {name}\nexperts: bf16{tiles}\n")
    return str(path)


@torch.inference_mode()
def expected_logits(model: Any, case: dict[str, list[list[int]]]) -> torch.Tensor:
    """The same steps' logits [steps, B, vocab] from one uncached pass a sequence (plain or transformers' model)."""
    columns = []
    for prompt, forced in zip(case["prompts"], case["forced"], strict=True):
        out = model(torch.tensor([prompt + forced]))
        logits = out if isinstance(out, torch.Tensor) else out.logits
        columns.append(logits[0, len(prompt) - 1 : len(prompt) + len(forced)])
    return torch.stack(columns, dim=1)


@torch.inference_mode()
def choice_gaps(model: KimiK2ForCausalLM, case: dict[str, list[list[int]]]) -> torch.Tensor:
    """How far from a tie the experts' choice is: float32 [steps, B], the least over the layers.

    The score of the last expert chosen less that of the next one; where it is small, rounding makes another choice.
    """
    gaps: list[torch.Tensor] = []

    def note(gate: Router, given: tuple[torch.Tensor], _: Any) -> None:
        best = (gate.logits(given[0]).sigmoid() + gate.e_score_correction_bias).topk(gate.top_k + 1, dim=1).values
        gaps.append(best[:, -2] - best[:, -1])

    hooks = [one.register_forward_hook(note) for one in model.modules() if isinstance(one, Router)]
    columns = []
    for prompt, forced in zip(case["prompts"], case["forced"], strict=True):
        gaps.clear()
        model(torch.tensor([prompt + forced]))
        columns.append(torch.stack(gaps).amin(dim=0)[len(prompt) - 1 :])
    for hook in hooks:
        hook.remove()
    return torch.stack(columns, dim=1)


def plain_model(directory: Path) -> KimiK2ForCausalLM:
    """The plain model of a checkpoint in float32."""
    return KimiK2ForCausalLM.from_pretrained(directory)
