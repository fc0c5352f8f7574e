"""Stock vLLM against our plugin in one run: the engines warm side by side, timed in turns, one table.

    python scripts/vllm_table.py DIRECTORY --pairs fp8 --layers 12
    python scripts/vllm_table.py DIRECTORY --pairs fp8 int4 fp8-1 fp8-6-tp2 --devices 0 1 1 0,1 --runner
    python scripts/vllm_table.py DIRECTORY --pairs fp8-61 --devices 0/1
    python scripts/vllm_table.py DIRECTORY --pairs fp8-6-dp2-alone --devices 0,1 --requests 64 128 256 --contexts 1024 \
        --prompts --temperatures
    python scripts/vllm_table.py DIRECTORY --pairs int4 --requests 2 40 --contexts 10240 --prompts 10240 --new 512

A pair is stock and ours of a form of experts, `fp8` or `int4`, then marks: `-6` for six layers (one layer is what the
engine takes by itself; 61 layers have a smaller cache), `-v2` for vLLM's second model runner, `-tp2` for two ranks,
`-ep2` for two with experts shared out, `-dp2` for two data-parallel ones, which share out experts of a model of whole
width (each has all the requests: tokens a second a GPU are requests by TPOT), `-kv8` for a cache in e4m3, `-alone` for
engines that come up one after the other, as both do not fit. With `0/1` stock has GPU 0 and ours GPU 1, and both are
timed at once. Needs vLLM, this package and Hopper GPUs that hold the models (12 layers: 33 GB each with the cache of 64
requests of 8k, 61 layers: 125). FP8 linears of stock vLLM are compiled meanwhile, several at once
(`warm_deep_gemm.py`). Logs and figures go to DIRECTORY; figures are printed and written as they come, the ones that
matter most first. Whatever else runs on the host is in the figures of few requests: engines that are not being timed
are stopped, and after a figure stands how many cores were busy meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import signal
import socket
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
DEEP = "61"  # layers: all of the model
# As `warm_deep_gemm.LINEARS`, of whole width.
WHOLE = ["2112x7168", "12288x1536", "16384x512", "7168x8192", "36864x7168", "7168x18432", "4096x7168", "7168x2048"]


def busy() -> tuple[float, float]:
    """Seconds of this machine's cores so far: busy, and taken away by its host; (0, 0) where /proc is not."""
    try:
        ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return 0.0, 0.0
    user, nice, system, _, _, irq, softirq, steal = ticks
    hertz = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / hertz, steal / hertz


class Engine:
    """An engine in processes of its own that times what it is asked to.

    Args:
        name: `stock` or `ours`, then anything: `ours-int4`.
        directory: for its log and figures.
        options: of `vllm_slice.py`.
        environment: added to this process's.
        replicas: data-parallel ranks, each of which is asked the same at the same time; the slowest is heard.
    """

    def __init__(
        self, name: str, directory: Path, options: Sequence[str], environment: Mapping[str, str], replicas: int = 1
    ) -> None:
        self.name, self.directory, self.options, self.environment = name, directory, options, environment
        self.asked, self.processes = 0, list[subprocess.Popen[str]]()
        self.ready = [directory / f"{name}.{replica}.ready" for replica in range(replicas)]

    def start(self) -> None:
        """Begin to come up."""
        experts, *rest = self.options
        environment = {**os.environ, **SETTINGS, "VLLM_PLUGINS": PLUGINS[self.name.partition("-")[0]]}
        port = free_port()
        for replica, ready in enumerate(self.ready):
            ready.unlink(missing_ok=True)
            command = [sys.executable, str(HERE / "vllm_slice.py"), experts, str(ready), *rest, "--by-line"]
            place: dict[str, Any] = {"RANK": replica, "RANK_LOCAL": replica, "SIZE": len(self.ready)}
            place |= {"MASTER_PORT": port, "MASTER_IP": "127.0.0.1"}
            named = {f"VLLM_DP_{what}": str(value) for what, value in place.items()} if len(self.ready) > 1 else {}
            with (self.directory / f"{self.name}.{replica}.log").open("w") as log:
                self.processes.append(subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True,
                    env={**environment, **self.environment, **named}, start_new_session=True,
                ))  # fmt: skip

    def ended(self) -> list[int | None]:
        """Statuses of its processes, if one of them has ended."""
        statuses = [process.poll() for process in self.processes]
        return statuses if any(status is not None for status in statuses) else []

    def is_warm(self) -> bool:
        """Whether it can be asked."""
        return bool(self.processes) and all(ready.exists() for ready in self.ready)

    def stop(self) -> None:
        """Take the cores away from all of its processes, until it is asked."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)

    def begin(self, **asked: Any) -> bool:
        """Have it time something; False if it cannot."""
        self.asked += 1
        self.results = [
            self.directory / f"{self.name}-{self.asked}.{replica}.json" for replica in range(len(self.ready))
        ]
        for result in self.results:
            for left in (result, result.with_suffix(".so-far")):  # by another run
                left.unlink(missing_ok=True)
        if self.ended() or not self.is_warm():
            say(f"{self.name}: {self.ended()}, not timed")
            return False
        self._signal(signal.SIGCONT)
        self.began, self.busy_before = time.monotonic(), busy()
        for process, result in zip(self.processes, self.results, strict=True):
            assert process.stdin is not None
            wanted = {"requests": [], "contexts": [], "prompts": [], **asked, "result": str(result)}
            process.stdin.write(json.dumps(wanted) + "\n")
            process.stdin.flush()
        return True

    def end_of(self, limit: float) -> dict[str, float]:
        """Milliseconds by what was asked for; what is there after `limit` seconds."""
        until = time.monotonic() + limit
        while not all(result.exists() for result in self.results) and time.monotonic() < until and not self.ended():
            time.sleep(0.02)
        took, cores = time.monotonic() - self.began, zip(busy(), self.busy_before, strict=True)
        self.stop()
        figures: dict[str, float] = {}
        for result in self.results:
            file = next((path for path in (result, result.with_suffix(".so-far")) if path.exists()), None)
            for what, figure in (json.loads(file.read_text()) if file else {}).items():
                figures[what] = max(figure, figures.get(what, 0.0))
        own, taken = ((now - before) / took for now, before in cores)
        listed = ", ".join(f"{what} {figure:.3f}" for what, figure in figures.items())
        say(f"{self.name}: {listed} (busy cores {own:.1f}, {taken:.1f} taken away)")
        return figures

    def close(self) -> None:
        """Close its input, which ends it."""
        self._signal(signal.SIGCONT)
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()

    def end(self) -> None:
        """Wait until it has ended."""
        try:
            for process in self.processes:
                process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End all of its processes at once."""
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def free_port() -> int:
    """One at which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def wait(engines: Sequence[Engine], until: float) -> None:
    """Until all are warm, or the time is reached."""
    waiting = list(engines)
    while waiting and time.monotonic() < until:
        for engine in [one for one in waiting if one.is_warm() or one.ended()]:
            waiting.remove(engine)
            engine.stop()
            say(f"{engine.name} {'warm' if engine.is_warm() else 'ended: ' + str(engine.ended())}")
        time.sleep(0.2)


def table(stock: Mapping[str, float], ours: Mapping[str, float]) -> str:
    """A line for each figure that both have."""
    rows = [
        f"{what:36} {stock[what]:9.3f} / {ours[what]:9.3f} ms  {stock[what] / ours[what]:.2f}"
        for what in stock
        if what in ours
    ]
    return "\n".join(rows)


def warm_deep_gemm(directory: Path, linears: Sequence[str]) -> subprocess.Popen[bytes]:
    """Started, not waited for; of these linears, or of a slice's."""
    with (directory / "deep-gemm.log").open("w") as log:
        command = [sys.executable, str(HERE / "warm_deep_gemm.py"), *(["--linears", *linears] if linears else [])]
        return subprocess.Popen(command, stdout=log, stderr=log)


def rows(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """What is asked, and of which pairs (see `Pair.kind`): the engine's own floor and short contexts first."""
    few, many = [count for count in args.requests if count < 16], [count for count in args.requests if count >= 16]
    contexts, prompts = args.contexts, args.prompts
    yield "whole deep few", {"requests": few, "contexts": contexts[:1]}
    yield "whole deep", {"prompts": prompts[:1]}
    for temperature in args.temperatures:
        yield "whole", {"requests": few, "contexts": contexts[:1], "temperature": temperature}
    yield "whole deep", {"requests": many, "contexts": contexts[:1]}
    yield "ranks", {"requests": few, "contexts": contexts[:1]}
    yield "ranks", {"requests": many, "contexts": contexts[:1], "prompts": prompts[:1]}
    yield "whole deep", {"prompts": prompts[1:]}
    yield from (("whole deep", {"requests": [count], "contexts": contexts[1:]}) for count in args.requests[:-1])
    for temperature in args.temperatures:
        yield "whole", {"requests": many, "contexts": contexts[:1], "temperature": temperature}
    yield "whole", {"requests": args.requests[-1:], "contexts": contexts[1:]}


def own_runner(experts: str, layers: str, device: str) -> dict[str, float]:
    """Our own runner's step of one sequence of 1,024 tokens, of the same slice: milliseconds."""
    options = f"--preset h200-tp8 --stand-in --layers {layers} {NAMES[experts]} --routing uniform"
    options += " --batch-size 1 --context 1024 --prompt-length 0"
    command = [sys.executable, str(HERE / "run_cuda.py"), *options.split()]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    match = re.search(r"TPOT[^0-9]*([0-9.]+) ms", done.stdout)
    say(f"own runner, {experts}: {match[0] if match else done.stdout[-300:] + done.stderr[-300:]}")
    return {} if match is None else {"own runner": float(match[1])}


class Pair:
    """Stock and ours.

    Args:
        what: form of experts and marks, as on the command line.
        devices: `CUDA_VISIBLE_DEVICES`; of stock and of ours with a slash between.
        given: the command line.

    Attributes:
        kind: `whole` for all of the table, `few` for few requests, `ranks` for short contexts on several GPUs, `deep`
            for all that a small cache holds.
        device: of ours.
        at_once: each has a GPU of its own.
        alone: they come up one after the other.
    """

    def __init__(self, what: str, devices: str, args: argparse.Namespace) -> None:
        self.what, self.kind, self.at_once = what, "whole", "/" in devices
        of_stock, _, of_ours = devices.partition("/")
        self.device = of_ours or of_stock
        self.experts, *marks = what.split("-")
        requests, prompts, pages, layers = args.requests, args.prompts, args.pages, args.layers
        engine: dict[str, Any] = {}
        environment, executor = {}, args.executor
        ranks, replicas, self.alone = "1", 1, False
        for mark in marks:
            if mark in ("1", "v2"):
                self.kind, requests, prompts, pages = "few", requests[:2], prompts[:1], "600"
            if mark == DEEP:
                self.kind, pages = "deep", "2150"
            if mark.isdecimal():
                layers = mark
            elif mark == "v2":
                environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
            elif mark == "alone":
                self.alone = True
            elif mark == "kv8":
                engine |= {"kv_cache_dtype": "fp8"}
            elif mark.startswith("dp"):
                self.kind, replicas = "ranks", int(mark[2:])
                engine |= {"enable_expert_parallel": True}
            elif mark[:2] in ("tp", "ep"):
                self.kind, ranks, pages, prompts = "ranks", mark[2:], "2000", prompts[:1]
                engine |= {"enable_expert_parallel": True} if mark.startswith("ep") else {}
            else:
                raise SystemExit(f"{what}: no mark {mark}")
        options = [self.experts, "--layers", layers, "--pages", pages, "--ranks", ranks, "--engine", json.dumps(engine)]
        options += ["--requests", *map(str, requests), "--prompts", *map(str, prompts)]
        options += ["--executor", executor] if executor else []
        options += ["--new", str(args.new)] if args.new else []
        self.stock, self.ours = (
            Engine(f"{name}-{what}", args.directory, options, {**environment, "CUDA_VISIBLE_DEVICES": device}, replicas)
            for name, device in zip(PLUGINS, (of_stock, self.device), strict=True)
        )

    def ask(self, limit: float, engines: Sequence[Engine], **asked: Any) -> Iterator[tuple[Engine, dict[str, float]]]:
        """Time it with these of its engines: in turns, or at once where each has a GPU of its own."""
        for together in [engines] if self.at_once else [[engine] for engine in engines]:
            begun = {engine.name for engine in together if engine.begin(**asked)}
            yield from ((engine, engine.end_of(limit) if engine.name in begun else {}) for engine in together)


def measure(
    pairs: Sequence[Pair], engines: Sequence[Engine], timings: dict[str, dict[str, float]], args: argparse.Namespace
) -> None:
    """Ask these engines of the pairs all that is to be timed, and write it as it comes."""
    timings |= {engine.name: {} for engine in engines}
    asked = [
        (pair, [engine for engine in (pair.stock, pair.ours) if engine in engines], row)
        for kinds, row in rows(args)
        for pair in pairs
        if pair.kind in kinds.split() and ((row.get("requests") and row.get("contexts")) or row.get("prompts"))
    ]
    for _ in range(2):  # again what an engine was not yet warm for
        late = []
        for pair, of_it, row in asked:
            if time.monotonic() > BEGAN + args.within:
                break
            answers = list(pair.ask(120, of_it, **row))
            for engine, figures in answers:
                timings[engine.name] |= figures
            (args.directory / "figures.json").write_text(json.dumps(timings, indent=1))
            missing = [engine for engine, figures in answers if not figures]
            late += [(pair, missing, row)] if missing else []
        asked = late
    for pair in (pair for pair in pairs if args.runner and pair.kind == "whole"):
        timings[pair.ours.name] |= own_runner(pair.experts, args.layers, pair.device)
        (args.directory / "figures.json").write_text(json.dumps(timings, indent=1))


def run(
    pairs: Sequence[Pair], engines: Sequence[Engine], timings: dict[str, dict[str, float]], args: argparse.Namespace
) -> None:
    """Bring these engines of the pairs up together, time them, end them."""
    linears = WHOLE if any(len(engine.ready) > 1 for engine in engines) else []
    stock = any(engine.name.startswith("stock-fp8") for engine in engines)
    compiling = warm_deep_gemm(args.directory, linears) if stock else None
    try:
        for engine in engines:
            engine.start()
        wait(engines, time.monotonic() + args.ready)
        if compiling is not None:
            say(f"DeepGEMM compiled: {compiling.wait()}")
        measure(pairs, engines, timings, args)
    except BaseException:
        for engine in engines:
            engine.kill()
        raise
    for engine in engines:
        engine.close()
    for engine in engines:
        engine.end()


def main() -> None:
    """The table of one depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pairs", nargs="+", default=["fp8"], metavar="EXPERTS[-MARK]", help="see above")
    parser.add_argument("--devices", nargs="+", default=["0"], help="GPUs of the pairs in turn; 0,1 for two ranks")
    parser.add_argument("--layers", default="12")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--prompts", type=int, nargs="*", default=[1024, 8192, 32768])
    parser.add_argument("--new", type=int, help="tokens of a request that are timed; few if not given")
    parser.add_argument("--temperatures", type=float, nargs="*", default=[1.0], help="timed beside greedy, context 1k")
    parser.add_argument("--pages", default="8500", help="of the cache, 64 tokens each")
    parser.add_argument("--executor", choices=("uni", "mp"), help="vLLM's executor; mp is that of several ranks")
    parser.add_argument("--runner", action="store_true", help="also our own runner's step of one sequence")
    parser.add_argument("--ready", type=float, default=1200, help="seconds after which what is warm is timed")
    parser.add_argument("--within", type=float, default=3600, help="seconds after which nothing more is timed")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    pairs = [Pair(*one, args) for one in zip(args.pairs, itertools.cycle(args.devices), strict=False)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # by `timeout`, say: no engine is left behind
    timings: dict[str, dict[str, float]] = {}
    together = [pair for pair in pairs if not pair.alone]
    if together:
        run(together, [engine for pair in together for engine in (pair.stock, pair.ours)], timings, args)
    for pair in (pair for pair in pairs if pair.alone):
        for engine in (pair.stock, pair.ours):
            run([pair], [engine], timings, args)
    for pair in pairs:
        sys.stdout.write(f"{pair.what}: stock / ours\n{table(timings[pair.stock.name], timings[pair.ours.name])}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
