"""What the tests of this folder share: layouts, options, processes for a job, and logits beside the expected ones."""

from __future__ import annotations

import importlib.util
import inspect
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.plan.deployment import Deployment

# Degrees of tensor and expert parallelism.
LAYOUTS = {
    "TP1": (1, 1), "TP2": (2, 1), "TP4": (4, 1), "EP2": (1, 2), "TP2xEP2": (2, 2), "EP4": (1, 4), "TP4xEP2": (4, 2),
    "TP8": (8, 1), "TP32xEP2": (32, 2), "TP64": (64, 1),
}  # fmt: skip
TOLERANCE = 2e-5  # of logits in float32
# What would take the default run beyond ten minutes on two cores.
SLOW = pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="slow: runs with KIMI_K2_SLOW=1")
DRAWS = int(os.environ.get("KIMI_K2_DRAWS", "0"))
SEQ_LEN = 48
CLI = "from kimi_k2.cli import main; main()"
# Without LLVM's slow passes: compiling takes longer than running.
XLA = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def ranks_of(layout: str) -> int:
    tp, ep = LAYOUTS[layout]
    return tp * ep


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


def distances(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Relative L2 distance of each row."""
    out: torch.Tensor = ((found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)).squeeze()
    return out


def no_farther(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Our distances to float32 beside those of transformers in BF16, in the median; both are printed."""
    figures = [f"{float(errors.median()):.4f} ({float(errors.max()):.3f})" for errors in (ours, theirs)]
    print(f"\n{name}: relative L2, median (largest): ours {figures[0]}, transformers in BF16 {figures[1]}")
    assert float(ours.median()) <= float(theirs.median())


def launch(
    job: Callable[..., Any], *given: Any, ranks: int = 1, way: str = "CPU mode", timeout: float = 400, **named: Any
) -> Any:
    """What a module's function answers on rank 0, in processes of its own; a failing rank's error is the message.

    Args:
        job: the function.
        given: its arguments.
        named: the same, by name.
        ranks: of a process each in NxD's "CPU mode"; graphs that are "executed" on XLA's CPU, or only "lowered", have
            all of theirs in one process.
        way: one of these three.
        timeout: seconds.
    """
    if way == "executed" and importlib.util.find_spec("jax") is None:
        pytest.skip("needs jax (XLA for the CPU) to execute the graphs")
    function = inspect.unwrap(job)
    asked = {"module": Path(function.__code__.co_filename).stem, "name": function.__name__, "way": way}
    with tempfile.TemporaryDirectory() as directory, socket.socket() as probe:
        root = Path(directory)
        torch.save({**asked, "given": given, "named": named, "output": root / "output"}, root / "job")
        probe.bind(("127.0.0.1", 0))
        env = {name: value for name, value in os.environ.items() if name not in ("NXD_CPU_MODE", "WORLD_SIZE", "RANK")}
        env |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={ranks} {XLA}"
        processes, logs = [], [root / f"rank{rank}.log" for rank in range(ranks if way == "CPU mode" else 1)]
        probe.close()
        for rank, log in enumerate(logs):
            own = {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)} if way == "CPU mode" else {}
            command = [sys.executable, str(Path(__file__).with_name("worker.py")), str(root / "job")]
            processes.append(subprocess.Popen(command, env=env | own, stdout=log.open("w"), stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
        said = "\n".join(log.read_text()[-3000:] for log in logs)
        assert not any(codes), f"ranks exited with {codes}:\n{said}"
        return torch.load(root / "output", weights_only=False)


def check(name: str, found: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    """Logits against the expected ones; the largest difference is printed, and the same tokens are the likeliest."""
    print(f"\n{name}: max |difference| {float((found - expected).abs().max()):.1e}")
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


def command(
    *words: Any, ranks: int = 1, stdin: str | None = None, program: Sequence[str] = ("-c", CLI), timeout: float = 400,
    **env: Any,
) -> str:  # fmt: skip
    """Standard output of `kimi-k2 WORDS`, or of another Python program, under torchrun if there are several ranks."""
    left_out = ("WORLD_SIZE", "RANK", "MASTER_PORT", "NXD_CPU_MODE")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    kept |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", **{name: str(value) for name, value in env.items()}}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "--no-python"]
    line = [sys.executable, *([] if ranks == 1 else [*launcher, sys.executable]), *program, *map(str, words)]
    done = subprocess.run(line, env=kept, input=stdin, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{words}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def bf16_preset(name: str, directory: Path) -> str:
    """A file with the preset whose routed experts are not quantized, so that the plain model is to be met exactly."""
    path = directory / f"{name}-bf16.yaml"
    tiles = "" if Deployment.load(name).neuron_config.decode == "xla" else "_tiles"
    path.write_text(f"like: {name}\nexperts: bf16{tiles}\n")
    return str(path)


def plain_model(directory: Path) -> KimiK2ForCausalLM:
    """The plain model of a checkpoint in float32."""
    return KimiK2ForCausalLM.from_pretrained(directory)
