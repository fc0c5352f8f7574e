"""Stock vLLM against our plugin in one run: both engines warm on one GPU, timed in turns, one table.

    python scripts/vllm_table.py DIRECTORY --experts fp8 --layers 12

Needs vLLM, this package and a Hopper GPU that holds both models (12 layers: 31 GB each with the cache of 64 requests of
8k). FP8 linears of stock vLLM are compiled first, several at once (`warm_deep_gemm.py`). Logs and figures go to
DIRECTORY; figures are printed as they come.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PLUGINS = {"stock": "kimi_k2_parsers", "ours": "kimi_k2"}
# DeepGEMM's own warm-up goes through all sizes one by one; FlashInfer's sampler is not part of the comparison.
SETTINGS = {"VLLM_DEEP_GEMM_WARMUP": "skip", "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1"}


def say(what: str) -> None:
    """A line at once, after the seconds since the start."""
    sys.stdout.write(f"{time.monotonic() - BEGAN:5.1f} s  {what}\n")
    sys.stdout.flush()


BEGAN = time.monotonic()


class Engine:
    """An engine in processes of its own that times what it is asked to.

    Args:
        name: `stock` or `ours`, then anything: `ours-mp`.
        directory: for its log and figures.
        options: of `vllm_slice.py`.
        environment: added to this process's.
    """

    def __init__(self, name: str, directory: Path, options: Sequence[str], environment: Mapping[str, str]) -> None:
        self.name, self.directory, self.asked = name, directory, 0
        self.ready = directory / f"{name}.ready"
        self.ready.unlink(missing_ok=True)
        experts, *rest = options
        command = [sys.executable, str(HERE / "vllm_slice.py"), experts, str(self.ready), *rest, "--by-line"]
        plugins = PLUGINS[name.partition("-")[0]]
        with (directory / f"{name}.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
                env={**os.environ, **SETTINGS, "VLLM_PLUGINS": plugins, **environment},
            )  # fmt: skip

    def is_ready(self) -> bool:
        """Warm; or ended, which `ask` will say."""
        return self.ready.exists() or self.process.poll() is not None

    def ask(self, limit: float, **asked: Any) -> dict[str, float]:
        """Time it; what is there after `limit` seconds."""
        self.asked += 1
        result = self.directory / f"{self.name}-{self.asked}.json"
        if self.process.poll() is not None or not self.ready.exists():
            say(f"{self.name}: {self.process.poll()}, not timed")
            return {}
        assert self.process.stdin is not None
        wanted = {"requests": [], "contexts": [], "prompts": [], **asked, "result": str(result)}
        self.process.stdin.write(json.dumps(wanted) + "\n")
        self.process.stdin.flush()
        until = time.monotonic() + limit
        while not result.exists() and time.monotonic() < until and self.process.poll() is None:
            time.sleep(0.05)
        partial = result.with_suffix(".so-far")
        found = next((path for path in (result, partial) if path.exists()), None)
        figures: dict[str, float] = json.loads(found.read_text()) if found else {}
        say(f"{self.name}: {', '.join(f'{what} {figure:.3f}' for what, figure in figures.items())}")
        return figures

    def end(self) -> None:
        """Close its input, which ends it."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def wait(engines: Sequence[Engine], until: float) -> None:
    """Until all are warm, or the time is reached."""
    waiting = list(engines)
    while waiting and time.monotonic() < until:
        for engine in [one for one in waiting if one.is_ready()]:
            waiting.remove(engine)
            say(f"{engine.name} {'warm' if engine.ready.exists() else 'ended: ' + str(engine.process.poll())}")
        time.sleep(0.2)


def table(stock: Mapping[str, float], ours: Mapping[str, float]) -> str:
    """A line for each figure that both have."""
    rows = [
        f"{what:24} {stock[what]:9.3f} / {ours[what]:9.3f} ms  {stock[what] / ours[what]:.2f}"
        for what in stock
        if what in ours
    ]
    return "\n".join(rows)


def warm_deep_gemm(directory: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Started, not waited for."""
    with (directory / "deep-gemm.log").open("w") as log:
        command = [sys.executable, str(HERE / "warm_deep_gemm.py")]
        return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})


def main() -> None:
    """The table of one depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--experts", default="fp8", choices=("fp8", "int4"))
    parser.add_argument("--layers", default="12")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--prompts", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--executor", default="uni", choices=("uni", "mp"))
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    options = [given.experts, "--layers", given.layers, "--executor", given.executor]
    compiling = warm_deep_gemm(given.directory, {}) if given.experts == "fp8" else None
    engines = {name: Engine(name, given.directory, options, {}) for name in PLUGINS}
    if compiling is not None:
        say(f"DeepGEMM compiled: {compiling.wait()}")
    wait(list(engines.values()), BEGAN + 1200)
    found: dict[str, dict[str, float]] = {name: {} for name in engines}
    asked: list[dict[str, Any]] = [{"requests": given.requests, "contexts": [length]} for length in given.contexts]
    for one in (*asked, {"prompts": given.prompts}):
        for name, engine in engines.items():
            found[name] |= engine.ask(600, **one)
    sys.stdout.write(table(found["stock"], found["ours"]) + "\n")
    for engine in engines.values():
        engine.end()


if __name__ == "__main__":
    main()
