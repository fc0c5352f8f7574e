"""A server under random requests: streams given up, huge and too long prompts, bad JSON; no wrong token, no leak.

Each answer is what the server said to that prompt alone, before the others came. KIMI_K2_SOAK_SECONDS sets how long
(30); a sixth of it, at most 300, runs before anything is compared. KIMI_K2_SLOW=1 adds two data-parallel ranks with
experts shared out, a cache so small that requests lose their pages, and prompts of up to 100,000 tokens (a CPU's: 700)
that fill the cache, by our model and by vLLM's own. With -s a line a minute says what was met and held. On a GPU the
server runs there.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engines
import pytest
from engines import ON_GPU, OURS, SLOW, STOCK, WIDE
from judge import ROUNDING, slice_config
from scripted import write_hf_tokenizer, write_random_checkpoint

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint

engines.need("vllm")

SECONDS = float(os.environ.get("KIMI_K2_SOAK_SECONDS", "30"))
LONGEST = 2048  # --max-model-len of the server
# What a server may have grown by, after warming up: bytes; connections that it may still be closing; threads that pools
# start late; bytes of PyTorch's allocator.
MORE = {"resident": 64 * 2**20, "files": 6, "threads": 8, "allocated": 64 * 2**20}
REFUSED = (400, 404, 422)
NEW = 48  # tokens of an answer
MOST = ROUNDING if ON_GPU else 1e-3  # of a log-probability, from that alone
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"}


def post(url: str, body: bytes) -> Any:
    asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    return urllib.request.urlopen(asked, timeout=120)


class Soak:
    """Clients of one server, and what they met: each answer is what it was alone, and has no NaN.

    Args:
        url: of the server.
        clients: how many.
        prompts: whose answers alone are asked for first.
        most: how far a token's log-probability may lie from that alone, in an answer's mean.
    """

    def __init__(self, url: str, clients: int, prompts: list[list[int]], most: float) -> None:
        self.url, self.clients, self.most = url, clients, most
        self.met, self.problems, self.largest, self.fullest = Counter[str](), list[str](), 0.0, 0.0
        self.kinds = [*[self.answer] * 4, *[self.given_up] * 2, self.huge, *[self.refused] * 3]
        self.alone = [(prompt, self.said(prompt)) for prompt in prompts]

    def held(self, release: str = "") -> dict[str, float]:
        """By all of the server's processes; its allocator gives back what it holds unused first, if asked."""
        import psutil

        children = psutil.Process().children(recursive=True)
        asked = {"method": "kimi_k2_memory", "args": [release]}
        with post(f"{self.url.removesuffix('/v1')}/collective_rpc", json.dumps(asked).encode()) as answer:
            allocator = json.load(answer)["results"][0]
        return {
            "resident": sum(child.memory_info().rss for child in children),
            "files": sum(child.num_fds() for child in children),
            "threads": sum(child.num_threads() for child in children), **allocator,
        }  # fmt: skip

    def run(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(self.clients) as pool:
            clients = [pool.submit(self.client, seed, until) for seed in range(self.clients)]
            while wait(clients, timeout=60).not_done:
                print(f"{time.strftime('%H:%M:%S')} {dict(self.met)} {self.problems} {self.held()}", flush=True)

    def client(self, seed: int, until: float) -> None:
        draw = random.Random(seed)
        while time.monotonic() < until and not self.problems:
            kind = draw.choice(self.kinds)
            try:
                kind(draw)
            except Exception as error:
                self.problems.append(f"{kind.__name__}: {error!r}")
            self.met[kind.__name__] += 1

    def completion(self, prompt: list[int], count: int, **options: Any) -> bytes:
        fields = {"model": "kimi", "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        return json.dumps({**fields, "return_token_ids": True, **options}).encode()

    def ask(self, *asked: Any, **options: Any) -> Any:
        return post(f"{self.url}/completions", self.completion(*asked, **options))

    def said(self, prompt: list[int], count: int = NEW, stream: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Tokens, and the twenty likeliest at each place; whole, or as a stream."""
        with self.ask(prompt, count, stream=stream, logprobs=20, return_tokens_as_token_ids=True) as answer:
            events = [line.decode().strip().removeprefix("data: ") for line in answer]
        choices = [json.loads(event)["choices"][0] for event in events if event not in ("", "[DONE]")]
        tokens = [token for choice in choices for token in choice["token_ids"] or []]
        likely = [place for choice in choices if choice["logprobs"] for place in choice["logprobs"]["top_logprobs"]]
        assert len(tokens) == count
        return list(zip(tokens, likely, strict=True))

    def answer(self, draw: random.Random) -> None:
        """Up to where rounding chose another of two tokens: behind the same tokens the same log-probabilities."""
        (prompt, alone), stream = draw.choice(self.alone), draw.random() < 0.25
        self.fullest = max(self.fullest, self.metric("vllm:kv_cache_usage_perc"))
        errors, said = list[float](), self.said(prompt, NEW if stream else draw.randint(1, NEW), stream)
        for (token, likely), (found, others) in zip(alone, said, strict=False):
            name = f"token_id:{token}"
            errors.append(abs(others.get(name, math.nan) - likely[name]))
            if found != token:
                self.met["rounded otherwise"] += 1
                break
        mean = sum(errors) / len(errors)
        self.largest = max(self.largest, mean)
        # The mean of a few is judged as one is: its error is 0.41 at most in docs/measurements.md, and here are two.
        if not mean <= self.most * (1 if len(errors) >= 16 else 8):
            self.problems.append(f"{errors} from alone behind {len(prompt)} tokens: {said} for {alone}")

    def given_up(self, draw: random.Random) -> None:
        with self.ask(draw.choice(self.alone)[0], 400, stream=True) as stream:
            for _ in range(draw.randint(0, 6)):
                stream.readline()

    def huge(self, draw: random.Random) -> None:
        prompt = [draw.randrange(500) for _ in range(draw.randint(LONGEST // 2, LONGEST - 10))]
        with self.ask(prompt, 5) as answer:
            assert len(json.load(answer)["choices"][0]["token_ids"]) == 5

    def refused(self, draw: random.Random) -> None:
        """What is too long, cut off, or has a field of no such value."""
        whole = self.completion([1, 2, 3], 5)
        wrong: dict[str, Any] = draw.choice([{"max_tokens": -1}, {"temperature": "hot"}, {"model": "none"}, {"n": 0}])
        body = draw.choice([
            self.completion([1] * (LONGEST + draw.randint(0, 5000)), 5), whole[: draw.randint(1, len(whole) - 1)],
            self.completion([1, 2, 3], 5, **wrong),
        ])  # fmt: skip
        try:
            with post(f"{self.url}/completions", body) as answer:
                self.problems.append(f"took {body[:80]!r}: {answer.status}")
        except urllib.error.HTTPError as error:
            json.load(error)
            self.problems += [f"{error.code} for {body[:80]!r}"] * (error.code not in REFUSED)

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/metrics", timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line.startswith(name)]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def idle(self) -> bool:
        return self.metric("vllm:num_requests_running") == self.metric("vllm:num_requests_waiting") == 0


def write_model(directory: Path, **sizes: int) -> None:
    """On a GPU with a rank's sizes."""
    if not ON_GPU:
        write_random_checkpoint(directory, "kimi-k2-thinking", **sizes)
        return
    write_synthetic_checkpoint(directory, slice_config("kimi-k2-instruct-0905").model_copy(update=sizes), seed=3)
    write_hf_tokenizer(directory)


@contextmanager
def soaking(directory: Path, lengths: list[int], most: float, options: Sequence[str], clients: int) -> Iterator[Soak]:
    """Of a server of the model in a directory."""
    draw = random.Random(0)
    prompts = [[draw.randrange(500) for _ in range(length)] for length in lengths]
    more = ("--worker-extension-cls", "in_workers.Memory", *options)
    with engines.serving(directory / "model", directory / "log", *more) as url:
        yield Soak(url, clients, prompts, most)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():  # the first opens /collective_rpc
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (1, ()),
        pytest.param(1, ("--num-gpu-blocks-override", "132" if not ON_GPU else "60"), marks=SLOW),
        pytest.param(2, ("--data-parallel-size", "2", "--enable-expert-parallel"), marks=SLOW),
    ],
    ids=["one", "few pages", "two replicas"],
)
def test_random_requests(replicas: int, options: tuple[str, ...], tmp_path: Path) -> None:
    draw = random.Random(0)
    write_model(tmp_path / "model")
    lengths = [draw.randint(2, LONGEST - 500 if ON_GPU else 120) for _ in range(12)]
    with soaking(tmp_path, lengths, MOST, options, clients=6 * replicas) as soak:
        soak.run(min(SECONDS / 6, 300))  # allocators, caches of compiled things
        if ON_GPU:  # the longest prompts at once: what a step can need at most is then held by the allocator
            with ThreadPoolExecutor(12) as pool:
                list(pool.map(soak.huge, map(random.Random, range(12))))
        before = soak.held(release="release")
        soak.met.clear()
        soak.run(SECONDS)
        assert soak.problems == []
        end = time.monotonic() + 60
        while not soak.idle() and time.monotonic() < end:
            time.sleep(0.5)
        assert soak.idle() and soak.metric("vllm:kv_cache_usage_perc") == 0
        after, preempted = soak.held(release="release"), soak.metric("vllm:num_preemptions_total")
        print(f"{sum(soak.met.values())} requests in {SECONDS:.0f} s: {dict(soak.met)}; {preempted:.0f} preempted")
        print(f"before: {before}; after: {after}; largest mean distance {soak.largest:.4f}")
        assert (tmp_path / "log").read_text().count(f"kimi-k2: {OURS}") == replicas
        assert preempted > 0 or "--num-gpu-blocks-override" not in options
        for name in after:
            assert after[name] - before[name] < MORE.get(name, float("inf")) * replicas, name
        soak.answer(draw)
        assert soak.problems == []
        assert len(soak.met) >= 4 or SECONDS < 20
        assert ON_GPU or not soak.met["rounded otherwise"]


# Of our model in vLLM's batch-invariant mode an answer has the bits that it has alone.
WHOSE = {"ours": {}, "invariant": {"VLLM_BATCH_INVARIANT": "1"}, "stock": STOCK}


@pytest.mark.parametrize("whose", [pytest.param(whose, marks=SLOW) for whose in WHOSE])
def test_long_prompts_in_a_full_cache(whose: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if whose == "invariant" and not ON_GPU:
        pytest.skip("vLLM has that mode on GPUs alone")
    for name, value in WHOSE[whose].items():
        monkeypatch.setenv(name, value)
    draw = random.Random(0)
    longest, page = (100_000, 64) if ON_GPU else (700, 16)
    of_router = {"n_routed_experts": 384} if whose == "invariant" else {}  # which takes the real model's
    write_model(tmp_path / "model", **(of_router if ON_GPU else WIDE))
    lengths = [longest - NEW, *(draw.randint(longest // 8, longest - NEW) for _ in range(5))]  # short ones fill gaps
    options = ["--num-gpu-blocks-override", str(7 * longest // 2 // page), "--max-model-len", str(longest + 400)]
    options += ["--block-size", str(page), "--no-enable-prefix-caching"]
    with soaking(tmp_path, lengths, 0.0 if whose == "invariant" else MOST, options, clients=8) as soak:
        soak.kinds = [soak.answer, soak.answer, soak.given_up]
        soak.run(SECONDS)
        preempted = soak.metric("vllm:num_preemptions_total")
        print(f"{whose}: {dict(soak.met)} in {SECONDS:.0f} s; cache {soak.fullest:.3f} full, {preempted:.0f} preempted;"
              f" largest mean distance {soak.largest:.4f}")  # fmt: skip
        assert soak.problems == []
        assert soak.fullest > 0.9 and soak.met["answer"] > 8
        assert preempted > 0 or ON_GPU  # where vLLM 0.24 preempted none of 900 requests
    assert (f"kimi-k2: {OURS}" in (tmp_path / "log").read_text()) == (whose != "stock")
