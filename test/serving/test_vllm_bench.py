"""`vllm bench serve`'s own client and figures against ours, of the same streams and clock: equal, not near."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kimi_k2.bench.endpoint.client import Answer, Endpoint
from kimi_k2.bench.endpoint.load import summarize

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vllm (docs/engines.md): not importable here: vllm", allow_module_level=True)

PROMPT, DURATION = [1, 2, 3], 12.5


@dataclass
class Plan:
    """A stream: when each write is made, seconds after the request, and the events in it."""

    writes: list[tuple[float, list[dict[str, Any]]]]
    tokens: int
    comments: bool = False


@dataclass
class Server:
    """Plays a plan over HTTP. Its clock stands still but for the writes, and waits until the client has read it."""

    plan: Plan
    now: float = 0.0
    read: asyncio.Queue[None] = field(default_factory=asyncio.Queue)

    def clock(self) -> float:
        self.read.put_nowait(None)
        return self.now

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        await reader.readexactly(int(head.partition("content-length:")[2].partition("\r\n")[0]))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        await self.read.get()  # the client's start
        start = self.now
        for after, events in self.plan.writes:
            if self.plan.comments:
                self.now = start + after / 2
                await self.send(writer, b": ping\n\n")
            self.now = start + after
            await self.send(writer, b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events))
            for event in events:
                if event["choices"]:
                    await self.read.get()
        await self.send(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        writer.close()

    @staticmethod
    async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await writer.drain()


def plan(seed: int) -> Plan:
    """Up to 40 chunks of one or three tokens, at times two in a write, at times without text; the counts at the end."""
    draw = random.Random(seed)
    at, tokens = 0.0, 0
    writes: list[tuple[float, list[dict[str, Any]]]] = []
    for _ in range(draw.randint(1, 20)):
        at += draw.uniform(0.01, 0.9)
        events = []
        for _ in range(draw.choice((1, 1, 1, 2))):
            bundle = draw.choice((1, 1, 1, 3))
            tokens += bundle
            events.append({"choices": [{"index": 0, "text": draw.choice(("", "x")) * bundle}]})
        writes.append((at, events))
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": tokens}
    return Plan([*writes, (at + 5, [{"choices": [], "usage": usage}])], tokens, comments=seed % 2 == 0)


Client = Callable[[Server, str], Awaitable[Any]]


async def ours(server: Server, url: str) -> Answer:
    endpoint = Endpoint(url)
    try:
        return await endpoint.complete("m", PROMPT, server.plan.tokens, clock=server.clock)
    finally:
        await endpoint.close()


async def theirs(server: Server, url: str) -> Any:
    import aiohttp
    from vllm.benchmarks.lib import endpoint_request_func as functions

    functions.time = SimpleNamespace(perf_counter=server.clock)
    asked = functions.RequestFuncInput(PROMPT, f"{url}/completions", len(PROMPT), server.plan.tokens, "m")
    async with aiohttp.ClientSession() as session:
        return await functions.async_request_openai_completions(asked, session)


async def measured(seed: int, client: Client) -> Any:
    server = Server(plan(seed), now=100.0)
    async with await asyncio.start_server(server.answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        return await asyncio.wait_for(client(server, f"http://127.0.0.1:{port}/v1"), 30)


def test_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.lib import endpoint_request_func as functions
    from vllm.benchmarks.serve import calculate_metrics

    monkeypatch.setattr(functions, "time", functions.time)  # what `theirs` puts there is taken out
    mine = [asyncio.run(measured(seed, ours)) for seed in range(24)]
    other = [asyncio.run(measured(seed, theirs)) for seed in range(24)]
    for one, two in zip(mine, other, strict=True):
        assert two.success, two.error
        assert (one.ttft, one.itl, one.latency) == (two.ttft, two.itl, two.latency)
        assert (one.prompt_tokens, one.output_tokens) == (two.prompt_len, two.output_tokens)
    asked = [SampleRequest(prompt="", prompt_len=len(PROMPT), expected_output_len=one.output_tokens) for one in mine]
    metrics, _ = calculate_metrics(asked, other, DURATION, None, [99], {})
    found = summarize(mine, DURATION)
    for name in ("ttft", "tpot", "itl", "e2el"):
        wanted = [getattr(metrics, f"mean_{name}_ms"), getattr(metrics, f"median_{name}_ms")]
        wanted.append(dict(getattr(metrics, f"percentiles_{name}_ms"))[99])
        assert [found[name][kind] * 1000 for kind in ("mean", "median", "p99")] == pytest.approx(wanted, rel=1e-12)
    for name in ("request_throughput", "output_throughput", "total_token_throughput"):
        assert found[name] == pytest.approx(getattr(metrics, name), rel=1e-12)
