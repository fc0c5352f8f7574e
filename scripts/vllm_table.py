"""Stock vLLM against our plugin in one run: the engines warm side by side, timed in turns, one table.

    python scripts/vllm_table.py DIRECTORY --experts fp8 --layers 12
    python scripts/vllm_table.py DIRECTORY --experts fp8 int4 --devices 0 1 --one-layer --runner

Needs vLLM, this package and a Hopper GPU that holds both models (12 layers: 31 GB each with the cache of 64 requests of
8k); a second GPU may hold the other form of experts. FP8 linears of stock vLLM are compiled first, several at once
(`warm_deep_gemm.py`). Logs and figures go to DIRECTORY; figures are printed and written as they come, the ones that
matter most first. Whatever else runs on the host is in the figures of few requests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
NAMES = {"fp8": "kimi-k2-instruct-0905", "int4": "kimi-k2-thinking"}
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
        name: `stock` or `ours`, then anything: `ours-int4`.
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


def rows(requests: Sequence[int], contexts: Sequence[int], prompts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """What is asked of each pair of engines in turn: few requests first, the long ones last."""
    few, many = [count for count in requests if count < 16], [count for count in requests if count >= 16]
    for length in contexts[:1]:
        yield {"requests": few, "contexts": [length]}
        yield {"prompts": list(prompts[:1])}
        yield {"requests": many, "contexts": [length]}
    yield {"prompts": list(prompts[1:])}
    for length in contexts[1:]:
        yield from ({"requests": [count], "contexts": [length]} for count in (*few, *many))


def own_runner(experts: str, layers: str, device: str) -> dict[str, float]:
    """Our own runner's step of one sequence of 1,024 tokens, of the same slice: milliseconds."""
    command = [sys.executable, str(HERE / "run_cuda.py"), "--preset", "h200-tp8", "--stand-in", "--layers", layers]
    command += ["--model", NAMES[experts], "--batch", "1", "--context", "1024", "--prompt", "0", "--routing", "uniform"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"TPOT[^0-9]*([0-9.]+) ms", done.stdout)
    say(f"own runner, {experts}: {found[0] if found else done.stdout[-300:] + done.stderr[-300:]}")
    return {} if found is None else {"own runner": float(found[1])}


def start(given: argparse.Namespace) -> dict[str, tuple[Engine, Engine]]:
    """Stock and ours, by what the table calls them: of each form of experts; of the first one also what is asked."""
    whole = ["--layers", given.layers, "--ranks", given.ranks, "--pages", given.pages]
    warm = ["--requests", *map(str, given.requests), "--prompts", *map(str, given.prompts)]
    few = ["--pages", "600", "--requests", "1", "4", "--prompts", "1024"]
    # Each one's name, form of experts, options, environment.
    wanted: list[tuple[str, str, list[str], dict[str, str]]] = [
        (kind, kind, [*whole, *warm], {}) for kind in given.experts
    ]
    first = given.experts[0]
    if given.ranks != "1":
        shared_out = ["--engine", json.dumps({"enable_expert_parallel": True})]
        wanted.append((f"{first}-ep", first, [*whole, *warm, *shared_out], {}))
    if given.one_layer:
        wanted.append((f"{first}-one-layer", first, [*whole, *few, "--layers", "1"], {}))
    if given.second_runner:
        wanted.append((f"{first}-v2", first, [*whole, *few], {"VLLM_USE_V2_MODEL_RUNNER": "1"}))
    pairs = {}
    for (what, kind, options, environment), device in zip(wanted, itertools.cycle(given.devices), strict=False):
        environment |= {"CUDA_VISIBLE_DEVICES": device, "KIMI_K2_VLLM_GPU": "1"}
        given_options = [kind, *(["--executor", given.executor] if given.executor else []), *options]
        stock, ours = (Engine(f"{name}-{what}", given.directory, given_options, environment) for name in PLUGINS)
        pairs[what] = stock, ours
    return pairs


def main() -> None:
    """The table of one depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--experts", nargs="+", default=["fp8"], choices=NAMES)
    parser.add_argument("--layers", default="12")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--prompts", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--pages", default="8500", help="of the cache, 64 tokens each")
    parser.add_argument("--executor", choices=("uni", "mp"), help="vLLM's executor; mp is that of several ranks")
    parser.add_argument("--ranks", default="1", help="GPUs of an engine; of several, experts shared out too")
    parser.add_argument("--devices", nargs="+", default=["0"], help="GPUs for engines in turn; 0,1 for two ranks")
    parser.add_argument("--one-layer", action="store_true", help="also one layer of each: what the engine itself takes")
    parser.add_argument("--second-runner", action="store_true", help="also vLLM's second model runner, few requests")
    parser.add_argument("--runner", action="store_true", help="also our own runner's step of one sequence")
    parser.add_argument("--ready", type=float, default=1200, help="seconds after which what is warm is timed")
    parser.add_argument("--within", type=float, default=3600, help="seconds after which nothing more is timed")
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    compiling = warm_deep_gemm(given.directory, {}) if "fp8" in given.experts else None
    pairs = start(given)
    if compiling is not None:
        say(f"DeepGEMM compiled: {compiling.wait()}")
    wait([engine for pair in pairs.values() for engine in pair], BEGAN + given.ready)
    long = [what for what in pairs if not what.endswith(("-one-layer", "-v2"))]
    found: dict[str, dict[str, float]] = {engine.name: {} for pair in pairs.values() for engine in pair}
    for number, row in enumerate(rows(given.requests, given.contexts, given.prompts)):
        for engine in (engine for what in (long if number else pairs) for engine in pairs[what]):
            if any(row.values()) and time.monotonic() < BEGAN + given.within:
                found[engine.name] |= engine.ask(120, **row)
                (given.directory / "figures.json").write_text(json.dumps(found, indent=1))
    for kind, device in zip(given.experts if given.runner else (), itertools.cycle(given.devices), strict=False):
        found[f"ours-{kind}"] |= own_runner(kind, given.layers, device)
        (given.directory / "figures.json").write_text(json.dumps(found, indent=1))
    for what, (stock, ours) in pairs.items():
        sys.stdout.write(f"{what}: stock / ours\n{table(found[stock.name], found[ours.name])}\n")
    for engine in itertools.chain(*pairs.values()):
        engine.end()


if __name__ == "__main__":
    main()
