"""Load on an OpenAI server: what is sent, what is read of its streams, and vLLM's own figures of the same answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from kimi_k2.bench.endpoint.client import Answer, Endpoint
from kimi_k2.bench.endpoint.load import Load, run_load, summarize
from kimi_k2.bench.endpoint.report import markdown, write_reports
from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.sweep import Settings

Serve = Callable[[Callable[[web.Request], Awaitable[web.Response]]], str]


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def stream(tokens: int, prompt: int, *, bundle: int = 1) -> str:
    """A server's stream of `tokens`, `bundle` of them a chunk."""
    chunks = [event(choices=[{"text": "x" * bundle}]) for _ in range(-(-tokens // bundle))]
    usage = event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": tokens})
    return ": ping\n\n" + "".join(chunks) + usage + "data: [DONE]\n\n"


class Server:
    """An OpenAI server; keeps what it is asked."""

    def __init__(self, serve: Serve, **options: Any) -> None:
        self.serve = serve
        self.asked: list[dict[str, Any]] = []
        self.running = self.most = 0
        self.options = options

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response({"data": [{"id": "served"}]})
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        fields = await request.json()
        self.asked.append(fields)
        self.running -= 1
        if len(fields["prompt"]) > self.options.get("longest", 1000):
            return web.json_response({"error": {"message": "too long"}}, status=400)
        made = self.options.get("made", fields["max_tokens"])
        return web.Response(text=stream(made, len(fields["prompt"]), bundle=self.options.get("bundle", 1)))

    def endpoint(self) -> Endpoint:
        return Endpoint(self.serve(self.answer))

    def complete(self, *given: Any, **options: Any) -> Answer:
        async def once() -> Answer:
            endpoint = self.endpoint()
            try:
                return await endpoint.complete(*given, **options)
            finally:
                await endpoint.close()

        return asyncio.run(once())


def ticks() -> Iterator[float]:
    return itertools.count(0.0, 0.25)


@pytest.mark.parametrize(("bundle", "gaps"), [(1, 7), (3, 2), (8, 0)])
def test_times_of_a_stream(serve: Serve, bundle: int, gaps: int) -> None:
    clock = ticks()
    answer = Server(serve, bundle=bundle).complete("m", [1, 2, 3], 8, clock=lambda: next(clock))
    assert (answer.prompt_tokens, answer.output_tokens, answer.ttft) == (3, 8, 0.25)
    assert answer.itl == [0.25] * gaps
    assert answer.latency == 0.25 * (gaps + 1)
    assert answer.tpot == pytest.approx(0.25 * gaps / 7)


def test_what_is_sent(serve: Serve) -> None:
    server = Server(serve)
    server.complete("m", [1, 2], 4)
    wanted = {"model": "m", "prompt": [1, 2], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    assert wanted.items() <= server.asked[0].items()
    assert server.asked[0]["stream_options"] == {"include_usage": True}


def test_figures_are_vllms() -> None:
    """The formulas of vllm.benchmarks.serve.calculate_metrics, in numpy."""
    draw = np.random.default_rng(0)
    answers = []
    for _ in range(37):
        gaps = draw.uniform(0.001, 0.1, size=draw.integers(1, 50)).tolist()
        ttft = float(draw.uniform(0.1, 1))
        answers.append(Answer(ttft, gaps, ttft + sum(gaps), int(draw.integers(1, 500)), len(gaps) + 1))
    answers.append(Answer(0.5, [], 0.5, 7, 1))  # one token: no TPOT
    found = summarize(answers, duration=12.5)
    series = {
        "ttft": [a.ttft for a in answers],
        "itl": [gap for a in answers for gap in a.itl],
        "e2el": [a.latency for a in answers],
        "tpot": [(a.latency - a.ttft) / (a.output_tokens - 1) for a in answers if a.output_tokens > 1],
    }
    for name, values in series.items():
        wanted = {"mean": np.mean(values), "median": np.median(values), "p99": np.percentile(values, 99)}
        assert found[name] == pytest.approx(wanted, rel=1e-12)
    made, read = sum(a.output_tokens for a in answers), sum(a.prompt_tokens for a in answers)
    assert found["request_throughput"] == pytest.approx(38 / 12.5)
    assert found["output_throughput"] == pytest.approx(made / 12.5)
    assert found["total_token_throughput"] == pytest.approx((made + read) / 12.5)


def settings(**options: Any) -> Load:
    fields: dict[str, Any] = {"output_lengths": (3, 5), "prompt_lengths": (4,), "batch_sizes": (1, 4), "runs": 3}
    return Load(Settings("m", "endpoint", **{**fields, **options}), 500)


def test_a_load(serve: Serve, tmp_path: Path) -> None:
    server, path, said = Server(serve), tmp_path / "serving.json", list[str]()
    results = run_load(server.endpoint(), settings(), path, said.append)
    assert [(c["input"], c["concurrency"], c["output"], len(c["requests"])) for c in results["cells"]] == [
        (4, 1, 3, 3), (4, 1, 5, 3), (4, 4, 3, 12), (4, 4, 5, 12),
    ]  # fmt: skip
    assert len(server.asked) == 2 * (3 + 1) + 2 * (12 + 4)
    assert server.most <= 4
    assert all(0 <= token < 500 for one in server.asked for token in one["prompt"])
    assert json.loads(path.read_text()) == results
    again = Server(serve)
    assert run_load(again.endpoint(), settings(), path, said.append) == results
    assert again.asked == []
    assert said[-1].endswith("kept")
    written = write_reports(results, tmp_path)
    assert [one.name for one in written] == ["serving.md", "serving.html"]
    assert markdown(results).count("\n|") == 6  # head, rule, four cells
    assert "<table" in written[1].read_text()
    with pytest.raises(SweepError, match="holds another load"):
        run_load(Server(serve).endpoint(), settings(runs=2), path)


def test_a_cell_that_fails_is_tried_again(serve: Serve, tmp_path: Path) -> None:
    path, load = tmp_path / "serving.json", settings(prompt_lengths=(4, 9))
    results = run_load(Server(serve, longest=5).endpoint(), load, path)
    assert [cell["status"] for cell in results["cells"]] == ["ok"] * 4 + ["failed"] * 4
    assert "too long" in results["cells"][-1]["error"]
    assert "failed" in markdown(results)
    assert {cell["status"] for cell in run_load(Server(serve).endpoint(), load, path)["cells"]} == {"ok"}


def test_another_number_of_tokens_is_refused(serve: Serve) -> None:
    with pytest.raises(SweepError, match="made 2 tokens, asked for 8"):
        Server(serve, made=2).complete("m", [1], 8)


def test_no_openai_server(serve: Serve, tmp_path: Path) -> None:
    async def html(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    with pytest.raises(SweepError, match="expected OpenAI's list of models"):
        run_load(Endpoint(serve(html)), settings(), tmp_path / "serving.json")


def test_a_server_that_breaks_off_or_is_not_there(serve: Serve) -> None:
    async def half(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    class Gone(Server):
        def endpoint(self) -> Endpoint:
            return Endpoint("http://127.0.0.1:9")

    class Broken(Server):
        answer = staticmethod(half)

    for kind in (Gone, Broken):
        with pytest.raises(SweepError, match="/v1/completions: "):
            kind(serve).complete("m", [1], 8)


def test_the_url_and_the_key(serve: Serve) -> None:
    for url in ("http://server", "http://server/", "http://server/v1", "http://server/v1/"):
        assert Endpoint(url).url == "http://server/v1"
    assert Endpoint("http://s").headers.get("Authorization") is None

    async def by_the_key(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": request.headers["Authorization"]}]})

    async def name() -> str:
        endpoint = Endpoint(serve(by_the_key), "key")
        try:
            return await endpoint.model()
        finally:
            await endpoint.close()

    assert asyncio.run(name()) == "Bearer key"
