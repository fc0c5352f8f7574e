"""A server under random requests: streams given up, huge and too long prompts, bad JSON; no wrong token, no leak.

KIMI_K2_SOAK_SECONDS sets how long (30), KIMI_K2_SOAK_WARM how long before anything is compared (a sixth of it, at most
300), KIMI_K2_SOAK_RATE the most requests a second (no limit): a long run beside other work. KIMI_K2_SOAK_WITHIN is for
the whole test, the server's start and end included: the run is as long as it leaves. KIMI_K2_SOAK_REPLICAS=2 has two
data-parallel ranks with experts shared out; KIMI_K2_SOAK_PAGES gives each rank a cache of so many pages, few enough
for requests to lose theirs. With -s a line a minute says what was met and held, and at the end what the log has of
tracebacks. On a GPU the server runs there.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import needs
import pytest
from judge import ROUNDING, Judge, write_slice
from vllm_server import ON_GPU

needs.engine("vllm")

SECONDS = float(os.environ.get("KIMI_K2_SOAK_SECONDS", "30"))
WARM_SECONDS = float(os.environ.get("KIMI_K2_SOAK_WARM", min(SECONDS / 6, 300)))
WITHIN = float(os.environ.get("KIMI_K2_SOAK_WITHIN", "inf"))
ENDING = 15.0  # seconds of WITHIN that the last checks and the server's end may take
RATE = float(os.environ.get("KIMI_K2_SOAK_RATE", "inf"))
REPLICAS = int(os.environ.get("KIMI_K2_SOAK_REPLICAS", "1"))
PAGES = os.environ.get("KIMI_K2_SOAK_PAGES")
CLIENTS = 6 * REPLICAS
LONGEST = 2048  # --max-model-len of the server
LEAK = 64 * 2**20 * REPLICAS  # bytes that a server may have grown by, after warming up
FILES, THREADS = CLIENTS, 8  # connections that a server may still be closing; threads that pools start late
REFUSED = (400, 404, 422)
PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?((ERROR|WARNING|INFO) \S+ \S+ \[[^]]*\] )?")  # of a line of vLLM's log


def post(url: str, body: bytes) -> Any:
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    return urllib.request.urlopen(asked, timeout=120)


@dataclass(frozen=True)
class Held:
    """What a process's children hold, all of them together."""

    resident: int  # bytes
    files: int  # open files and sockets
    threads: int
    cpu: float  # seconds since they began
    gpu: int | None  # bytes of its memory; None where the driver knows these processes by other numbers
    torch: dict[str, int]  # bytes of PyTorch's allocator in the worker, see vllm_memory.py

    @classmethod
    def by_children_of(cls, parent: int, url: str, release: bool = False) -> Held:
        """Of the server at `url`; its allocator gives back what it holds unused first, if asked."""
        import psutil

        children = psutil.Process(parent).children(recursive=True)
        asked = {"method": "kimi_k2_memory", "args": ["release"] if release else []}
        with post(f"{url.removesuffix('/v1')}/collective_rpc", json.dumps(asked).encode()) as answer:
            allocator = json.load(answer)["results"][0]
        return cls(
            sum(child.memory_info().rss for child in children),
            sum(child.num_fds() for child in children),
            sum(child.num_threads() for child in children),
            sum(sum(child.cpu_times()[:2]) for child in children),
            gpu_memory({child.pid for child in children}) if ON_GPU else None,
            allocator,
        )

    def __str__(self) -> str:
        said = f"{self.resident / 2**20:.1f} MiB, {self.files} files, {self.threads} threads, {self.cpu:.0f} s of CPU"
        said += "".join(f", {name} {size / 2**20:.1f} MiB" for name, size in self.torch.items())
        return said if self.gpu is None else f"{said}, {self.gpu >> 20} MiB of the GPU"


def gpu_memory(processes: set[int]) -> int | None:
    """Bytes of the GPU that these hold."""
    asked = ("nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits")
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    held = [[field.strip() for field in line.split(",")] for line in answer.splitlines()]
    found = [int(mib) << 20 for pid, mib in held if int(pid) in processes and mib.isdigit()]
    return sum(found) if found else None


class Pace:
    """At most `rate` requests a second, by all clients together."""

    def __init__(self, rate: float) -> None:
        self.gap, self.next, self.lock = 1 / rate, time.monotonic(), threading.Lock()

    def wait(self) -> None:
        with self.lock:
            turn = self.next = max(self.next + self.gap, time.monotonic())
        time.sleep(max(turn - time.monotonic(), 0))


class Soak:
    """Clients of one server, and what they met.

    Args:
        known: prompts and the model's tokens for them.
    """

    def __init__(self, url: str, known: list[tuple[list[int], list[int]]], until: float) -> None:
        self.url, self.known, self.until = url, known, until
        self.pace = Pace(RATE)
        self.met: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self) -> None:
        threads = [threading.Thread(target=self.client, args=(seed,)) for seed in range(CLIENTS)]
        for thread in threads:
            thread.start()
        report = time.monotonic() + 60
        for thread in threads:
            while thread.is_alive():
                thread.join(1)
                if time.monotonic() > report:
                    report += 60
                    held = Held.by_children_of(os.getpid(), self.url)
                    said = f"{dict(self.met)}; {len(self.problems)} problems; {held}"
                    print(f"{time.strftime('%H:%M:%S')} {said}", flush=True)

    def client(self, seed: int) -> None:
        draw = random.Random(seed)
        kinds = [self.tokens] * 3 + [self.stream, self.huge, self.too_long, self.bad_json, self.bad_fields]
        kinds += [self.given_up] * 2
        while time.monotonic() < self.until and not self.problems:
            kind = draw.choice(kinds)
            self.pace.wait()
            try:
                kind(draw)
            except Exception as error:
                self.problems.append(f"{kind.__name__}: {error!r}")
            self.met[kind.__name__] += 1

    def completion(self, prompt: list[int], count: int, **options: Any) -> bytes:
        fields = {"model": "kimi", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return json.dumps({**fields, "return_token_ids": True, **options}).encode()

    def tokens(self, draw: random.Random) -> None:
        prompt, wanted = draw.choice(self.known)
        count = draw.randint(1, len(wanted))
        with post(f"{self.url}/completions", self.completion(prompt, count)) as answer:
            found = json.load(answer)["choices"][0]["token_ids"]
        self.compare(prompt, wanted[:count], found)

    def stream(self, draw: random.Random) -> None:
        prompt, wanted = draw.choice(self.known)
        found: list[int] = []
        with post(f"{self.url}/completions", self.completion(prompt, len(wanted), stream=True)) as stream:
            for line in stream:
                event = line.decode().strip().removeprefix("data: ")
                if event not in ("", "[DONE]"):
                    found += json.loads(event)["choices"][0]["token_ids"] or []
        self.compare(prompt, wanted, found)

    def compare(self, prompt: list[int], wanted: list[int], found: list[int]) -> None:
        if found != wanted:
            self.problems.append(f"wrong tokens after {prompt}: {found} for {wanted}")

    def given_up(self, draw: random.Random) -> None:
        prompt, _ = draw.choice(self.known)
        with post(f"{self.url}/completions", self.completion(prompt, 400, stream=True)) as stream:
            for _ in range(draw.randint(0, 6)):
                stream.readline()

    def huge(self, draw: random.Random) -> None:
        prompt = [draw.randrange(500) for _ in range(draw.randint(LONGEST // 2, LONGEST - 10))]
        with post(f"{self.url}/completions", self.completion(prompt, 5)) as answer:
            assert len(json.load(answer)["choices"][0]["token_ids"]) == 5

    def too_long(self, draw: random.Random) -> None:
        self.refused(self.completion([1] * (LONGEST + draw.randint(0, 5000)), 5))

    def bad_json(self, draw: random.Random) -> None:
        whole = self.completion([1, 2, 3], 5)
        self.refused(whole[: draw.randint(1, len(whole) - 1)])

    def bad_fields(self, draw: random.Random) -> None:
        wrong: dict[str, Any] = draw.choice([{"max_tokens": -1}, {"temperature": "hot"}, {"model": "none"}, {"n": 0}])
        self.refused(self.completion([1, 2, 3], 5, **wrong))

    def refused(self, body: bytes) -> None:
        try:
            with post(f"{self.url}/completions", body) as answer:
                self.problems.append(f"took {body[:80]!r}: {answer.status}")
        except urllib.error.HTTPError as error:
            json.load(error)
            if error.code not in REFUSED:
                self.problems.append(f"{error.code} for {body[:80]!r}")


class JudgedSoak(Soak):
    """Where rounding may choose another token than float32 does: each answer is judged as a whole."""

    def __init__(self, url: str, judge: Judge, until: float) -> None:
        draw, unknown = random.Random(0), [0] * 64
        prompts = [[draw.randrange(500) for _ in range(draw.randint(2, LONGEST - 500))] for _ in range(24)]
        super().__init__(url, [(prompt, unknown) for prompt in prompts], until)
        self.judge, self.lock, self.largest, self.best, self.judged = judge, threading.Lock(), 0.0, 0, 0

    def compare(self, prompt: list[int], wanted: list[int], found: list[int]) -> None:
        if len(found) != len(wanted):
            self.problems.append(f"{len(found)} tokens, not {len(wanted)}")
        with self.lock:
            gaps = self.judge.gaps(prompt, found)
            self.best, self.judged = self.best + int((gaps == 0).sum()), self.judged + len(found)
            if len(found) >= 16:
                self.largest = max(self.largest, float(gaps.mean()))
        if len(found) >= 16 and float(gaps.mean()) > ROUNDING:
            self.problems.append(f"wrong tokens, {gaps.mean()} below the best: {found} after {prompt}")


def references(directory: Path) -> list[tuple[list[int], list[int]]]:
    from kimi_k2.engine.generate import generate
    from kimi_k2.engine.sampler import SamplingParams
    from kimi_k2.model.decoder import KimiK2ForCausalLM

    model, draw = KimiK2ForCausalLM.from_pretrained(directory), random.Random(0)
    prompts = [[draw.randrange(500) for _ in range(draw.randint(2, 120))] for _ in range(12)]
    return [(prompt, generate(model, [prompt], SamplingParams(48, ignore_eos=True)).token_ids[0]) for prompt in prompts]


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics", timeout=30) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(name)]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def together(soak: Soak) -> None:
    """The longest prompts at once: what a step can need at most is then held by the allocator."""
    for _ in range(3):
        threads = [threading.Thread(target=soak.huge, args=(random.Random(seed),)) for seed in range(2 * CLIENTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def tracebacks(log: str) -> Counter[str]:
    """How often each error ends a traceback of a log; numbers in it are left out."""
    found: Counter[str] = Counter()
    inside = False
    for line in log.splitlines():
        said = PREFIX.sub("", line)
        if said.startswith("Traceback (most recent call last)"):
            inside = True
        elif inside and said and not said.startswith((" ", "+", "|")):
            found[re.sub(r"\d+", "N", said)[:200]] += 1
            inside = False
    return found


def ours(log: Path) -> int:
    """Engines that say so."""
    return log.read_text().count("kimi-k2: operations are ours")


def test_random_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from scripted import write_hf_tokenizer, write_random_checkpoint
    from vllm_server import serving

    began = time.monotonic()
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")  # opens /collective_rpc
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    directory = tmp_path / "model"
    if ON_GPU:
        write_slice(directory)
        write_hf_tokenizer(directory)
        judge = Judge(directory)
    else:
        write_random_checkpoint(directory)
        known = references(directory)

    options = ["--worker-extension-cls", "vllm_memory.Memory"]
    if REPLICAS > 1:
        options += ["--data-parallel-size", str(REPLICAS), "--enable-expert-parallel"]
    if PAGES is not None:
        options += ["--num-gpu-blocks-override", PAGES]
    with serving(directory, tmp_path / "log", *options) as url:

        def new(seconds: float) -> Soak:
            until = time.monotonic() + seconds
            return JudgedSoak(url, judge, until) if ON_GPU else Soak(url, known, until)

        new(WARM_SECONDS).run()  # allocators, caches of compiled things
        if ON_GPU:
            together(new(0))
        before = Held.by_children_of(os.getpid(), url, release=True)
        seconds = min(SECONDS, WITHIN - ENDING - (time.monotonic() - began))
        soak = new(seconds)
        soak.run()
        busy = Held.by_children_of(os.getpid(), url)
        assert soak.problems == []
        for _ in range(120):
            if metric(url, "vllm:num_requests_running") == metric(url, "vllm:num_requests_waiting") == 0:
                break
            time.sleep(0.5)
        assert metric(url, "vllm:num_requests_running") == metric(url, "vllm:num_requests_waiting") == 0
        assert metric(url, "vllm:kv_cache_usage_perc") == 0
        after = Held.by_children_of(os.getpid(), url, release=True)
        print(f"{sum(soak.met.values())} requests in {seconds:.0f} s: {dict(soak.met)}")
        print(f"before: {before}; at the end: {busy}; after: {after}")
        preempted = metric(url, "vllm:num_preemptions_total")
        print(f"{preempted:.0f} preempted; operations are ours in {ours(tmp_path / 'log')} engines")
        assert ours(tmp_path / "log") == REPLICAS
        assert preempted > 0 or PAGES is None
        print(f"tracebacks: {dict(tracebacks((tmp_path / 'log').read_text()))}")
        if isinstance(soak, JudgedSoak):
            print(f"{soak.best} of {soak.judged} tokens are float32's best; largest mean gap {soak.largest:.4f}")
        assert after.resident - before.resident < LEAK
        if before.gpu is not None:
            assert after.gpu is not None
            assert after.gpu - before.gpu < LEAK
        assert after.torch.get("allocated", 0) - before.torch.get("allocated", 0) < LEAK
        assert after.files - before.files <= FILES
        assert after.threads - before.threads <= THREADS
        last = new(0)
        last.tokens(random.Random(1))
        assert last.problems == []
    assert (
        set(soak.met) == {"tokens", "stream", "given_up", "huge", "too_long", "bad_json", "bad_fields"} or seconds < 20
    )
