"""Our own runner under random requests, several at once: right logits, constant memory, no hang.

KIMI_K2_SOAK_SECONDS sets how long (6). Each client has a stream and graphs of its own over one model of real-size
layers.

A client's request is a batch of prompts, prefixes of sequences whose logits were computed beforehand in float64, and
some decode steps that go on along them, so that every row of every step has a known answer. Some requests are given
up in the middle; some go through `stream`, also with prompts that are longer than what is known.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Iterator

import psutil
import pytest
import torch
from on_hopper import NEEDS_HOPPER
from torch import Tensor

from kimi_k2.bench.kernels.model import decide_routes, synthetic_rank, widened
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import CHUNK, Generator, prefill, sequence_slots, slots_needed
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.kernels.common import workspace
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.turns import Turns
from kimi_k2.ops import registry
from kimi_k2.sharding.layout import Layout

pytestmark = [*NEEDS_HOPPER, pytest.mark.memory(10)]
WANTED = os.environ.get("KIMI_K2_SOAK_SECONDS")
SECONDS, CLIENTS = float(WANTED or 6), (1, 2, 4) if WANTED else (2,)
# Sequences with known logits, their length, the longest prompt, tokens of a chunk: small where other tests run beside.
SEQUENCES, KNOWN, LONGEST, CHUNKS = (4, 5000, 12000, CHUNK) if WANTED else (2, 1200, 3000, 2048)
AT_ONCE = 200  # tokens whose logits in float64 are made together
# A step that takes longer hangs: the process ends with every thread's traceback.
HANGS = 60.0
# Largest distance of a row to float64. Ours, which rounds to e4m3 as well, was at most 8.0e-2 away over 600 s; the
# plain model in BF16 1.0e-1 over 2,400 rows: a comparison with it would measure its rounding. Another row is about 1.4
# off.
MOST_ERROR = 0.15
# MiB that may be held more after the second half of the time than after the first, everything given back both times.
LEAK = 256
Known = tuple[Tensor, Tensor]  # ids int64 [N, L] on the CPU, logits float32 [N, L, vocabulary] behind each of them


class Client:
    """Requests one after the other, each a drawn mix.

    Attributes:
        met: how many requests of each kind, prompts and decode steps there were.
        steps: launches a step and gives the largest distance of its rows, on the device, where it may not be known yet.
        last: the request under way is the last one.
    """

    def __init__(self, model: KimiK2ForCausalLM, known: Known, seed: int, chunk: int) -> None:
        # One generation at a time is a model's rule; these take turns by themselves, with the same weights.
        self.model = copy.copy(model)
        self.model.turns = Turns()
        self.generator, (self.ids, self.logits), self.chunk = Generator(self.model), known, chunk
        self.draw, self.stream, self.met = random.Random(seed), torch.cuda.Stream(), Counter[str]()
        self.last, self.steps = False, self.requests()

    def requests(self) -> Iterator[Tensor]:
        batch = 1
        while not self.last:
            if self.draw.random() < 0.05:
                batch = self.draw.choice([1, 1, 2, 3, 4, 7, 8, 16, 33])
            if self.draw.random() < 0.01:
                self.generator.close()
            kind = self.draw.choice(["checked"] * 6 + ["given up", "streamed"] * 2)
            yield from self.streamed(batch) if kind == "streamed" else self.checked(batch, kind == "given up")
            self.met.update({kind: 1, "prompts": batch})

    def checked(self, batch: int, given_up: bool) -> Iterator[Tensor]:
        """Prompts of different lengths, then decode steps along the sequences."""
        rows, steps = [self.draw.randrange(SEQUENCES) for _ in range(batch)], self.draw.randint(0, 12)
        lengths = [self.length(KNOWN - steps) for _ in rows]
        params = SamplingParams(steps + 1, ignore_eos=True)
        prompts = [self.ids[row, :length].tolist() for row, length in zip(rows, lengths, strict=True)]
        slots = slots_needed(self.model, prompts, params), sequence_slots(prompts, params)
        cache, decode = self.generator.prepare(batch, *slots)
        self.met["in pages"] += cache.pages is not None
        chunk = self.draw.choice([self.chunk // batch, self.chunk // batch, 64, 500])
        found = prefill(self.model, prompts, cache, chunk, read=self.generator.prompt)
        for step in range(steps + 1):
            at = [length + step - 1 for length in lengths]
            if step:
                found = decode(self.ids[rows, at].cuda(), torch.tensor(at, device="cuda"))
                self.met["decode steps"] += 1
            if given_up and self.draw.random() < 0.2:
                return
            wanted = self.logits[rows, at]
            yield ((found.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max()

    def streamed(self, batch: int) -> Iterator[Tensor]:
        """Through `stream`, which chooses tokens, and given up there; of long prompts for the memory that they take."""
        longest, count = self.draw.choice([(KNOWN, batch), (LONGEST, min(batch, 2))]), self.draw.randint(1, 20)
        prompt = torch.randint(0, int(self.ids.max()) + 1, (self.length(longest[0]),)).tolist()
        params = SamplingParams(count, ignore_eos=True)
        steps = self.generator.stream([prompt] * longest[1], params, chunk_size=self.chunk // longest[1])
        for _ in range(self.draw.randint(1, count)):
            tokens = next(steps).tokens
            assert len(tokens) == longest[1] and all(token is not None and token >= 0 for token in tokens)
            yield torch.zeros(())
        steps.close()

    def length(self, longest: int) -> int:
        """Of a prompt: short ones more often, as logarithms are drawn evenly."""
        return min(longest, int(longest ** self.draw.random()) + self.draw.randint(0, 9))

    def step(self) -> Tensor | None:
        """Launch the next one; None behind the last."""
        with torch.cuda.stream(self.stream):
            return next(self.steps, None)


def left_behind() -> tuple[float, float]:
    """MiB of the host's memory and of the GPU's that are held once everything that nobody needs is given back."""
    gc.collect()
    torch.cuda.synchronize()
    workspace.release()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each of PyTorch's streams that captured a GEMM
    torch.cuda.empty_cache()
    return psutil.Process().memory_info().rss / 2**20, torch.cuda.memory_reserved() / 2**20


def serve(clients: list[Client], seconds: float) -> tuple[float, float]:
    """Run the clients, each one's next step beside the others'; the largest distance, and the most MiB held."""
    worst, most, until = 0.0, 0.0, time.monotonic() + seconds
    while clients:
        faulthandler.dump_traceback_later(HANGS, exit=True)
        found = [client.step() for client in clients]  # all are launched before one is waited for
        for client, error in zip(clients, found, strict=True):
            client.stream.synchronize()
            worst = worst if error is None else max(worst, float(error))
            client.last = time.monotonic() > until  # it ends its request: no stream stays open
        assert worst < MOST_ERROR
        most = max(most, torch.cuda.memory_reserved() / 2**20)
        for client in [client for client, error in zip(clients, found, strict=True) if error is None]:
            client.generator.close()
            clients.remove(client)
    faulthandler.cancel_dump_traceback_later()
    return worst, most


@torch.inference_mode()
@pytest.mark.parametrize("count", CLIENTS)
def test_random_requests(count: int) -> None:
    config = KimiK2Config.load("kimi-k2-instruct-0905").model_copy(update={"num_hidden_layers": 2})
    model = decide_routes(synthetic_rank(config, Layout(8, target="cuda", experts="stored"), 0, communicate=False))
    ids = torch.randint(0, model.model.embed_tokens.weight.shape[0], (SEQUENCES, KNOWN))
    exact, logits = widened(model), torch.empty(SEQUENCES, KNOWN, len(model.lm_head.weight), device="cuda")
    registry.pin(registry.PLAIN)
    for row, wanted in zip(ids.cuda(), logits, strict=True):
        cache = exact.new_cache(1, KNOWN, torch.float64)
        for at in torch.arange(KNOWN, device="cuda").split(AT_ONCE):
            wanted[at] = exact(row[None, at], at[None], cache)[0].float()
    registry.pin("")
    del exact, cache
    met, before, behind = Counter[str](), left_behind(), []
    for half in range(2):
        clients = [Client(model, (ids, logits), 10 * half + number, CHUNKS // count) for number in range(count)]
        worst, most = serve([*clients], SECONDS / len(CLIENTS) / 2)
        met.update(sum((client.met for client in clients), Counter()))
        del clients
        behind.append(left_behind())
    grown = [later - sooner for sooner, later in zip(*behind, strict=True)]
    print(f"\n{count} clients, {SECONDS / len(CLIENTS):.0f} s: {dict(met)}; largest distance {worst:.1e};", end=" ")
    print(f"held by the GPU at most {most - before[1]:.0f} MiB, nothing running: grown by", end=" ")
    print(f"{grown[1]:.0f} MiB, host {grown[0]:.0f} MiB")
    assert met["prompts"] and met["decode steps"]
    assert max(grown) < LEAK
