"""Load on an OpenAI server: what is sent, what is read of its streams, and vLLM's own figures of the same answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from kimi_k2.bench.endpoint import client
from kimi_k2.bench.endpoint.client import Answer, Endpoint
from kimi_k2.bench.endpoint.load import Load, run_load, summarize
from kimi_k2.bench.endpoint.report import markdown, write_reports
from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.sweep import Settings


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def stream(tokens: int, prompt: int, *, bundle: int = 1) -> str:
    """A server's stream of `tokens`, `bundle` of them a chunk."""
    chunks = [event(choices=[{"text": "x" * bundle}]) for _ in range(-(-tokens // bundle))]
    usage = event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": tokens})
    return ": ping\n\n" + "".join(chunks) + usage + "data: [DONE]\n\n"


class Server:
    """An OpenAI server within the process; keeps what it is asked."""

    def __init__(self, **options: Any) -> None:
        self.asked: list[dict[str, Any]] = []
        self.running = self.most = 0
        self.options = options

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/models":
            return httpx2.Response(200, json={"data": [{"id": "served"}]})
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        fields = json.loads(request.content)
        self.asked.append(fields)
        self.running -= 1
        if len(fields["prompt"]) > self.options.get("longest", 1000):
            return httpx2.Response(400, json={"error": {"message": "too long"}})
        made = self.options.get("made", fields["max_tokens"])
        return httpx2.Response(200, text=stream(made, len(fields["prompt"]), bundle=self.options.get("bundle", 1)))

    def endpoint(self, **options: Any) -> Endpoint:
        return Endpoint("http://server", transport=httpx2.MockTransport(self.answer), **options)


def ticks() -> Iterator[float]:
    return itertools.count(0.0, 0.25)


@pytest.mark.parametrize(("bundle", "gaps"), [(1, 7), (3, 2), (8, 0)])
def test_times_of_a_stream(bundle: int, gaps: int) -> None:
    clock = ticks()
    answer = asyncio.run(Server(bundle=bundle).endpoint().complete("m", [1, 2, 3], 8, clock=lambda: next(clock)))
    assert (answer.prompt_tokens, answer.output_tokens, answer.ttft) == (3, 8, 0.25)
    assert answer.itl == [0.25] * gaps
    assert answer.latency == 0.25 * (gaps + 1)
    assert answer.tpot == pytest.approx(0.25 * gaps / 7)


def test_what_is_sent() -> None:
    server = Server()
    asyncio.run(server.endpoint().complete("m", [1, 2], 4))
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


def test_a_load(tmp_path: Path) -> None:
    server, path, said = Server(), tmp_path / "serving.json", list[str]()
    results = run_load(server.endpoint(), settings(), path, said.append)
    assert [(c["input"], c["concurrency"], c["output"], len(c["requests"])) for c in results["cells"]] == [
        (4, 1, 3, 3), (4, 1, 5, 3), (4, 4, 3, 12), (4, 4, 5, 12),
    ]  # fmt: skip
    assert len(server.asked) == 2 * (3 + 1) + 2 * (12 + 4)
    assert server.most <= 4
    assert all(0 <= token < 500 for one in server.asked for token in one["prompt"])
    assert json.loads(path.read_text()) == results
    again = Server()
    assert run_load(again.endpoint(), settings(), path, said.append) == results
    assert again.asked == []
    assert said[-1].endswith("kept")
    written = write_reports(results, tmp_path)
    assert [one.name for one in written] == ["serving.md", "serving.html"]
    assert markdown(results).count("\n|") == 6  # head, rule, four cells
    assert "<table" in written[1].read_text()
    with pytest.raises(SweepError, match="holds another load"):
        run_load(Server().endpoint(), settings(runs=2), path)


def test_a_cell_that_fails_is_tried_again(tmp_path: Path) -> None:
    path, load = tmp_path / "serving.json", settings(prompt_lengths=(4, 9))
    results = run_load(Server(longest=5).endpoint(), load, path)
    assert [cell["status"] for cell in results["cells"]] == ["ok"] * 4 + ["failed"] * 4
    assert "too long" in results["cells"][-1]["error"]
    assert "failed" in markdown(results)
    assert {cell["status"] for cell in run_load(Server().endpoint(), load, path)["cells"]} == {"ok"}


def test_another_number_of_tokens_is_refused() -> None:
    with pytest.raises(SweepError, match="made 2 tokens, asked for 8"):
        asyncio.run(Server(made=2).endpoint().complete("m", [1], 8))


def test_no_openai_server() -> None:
    async def html(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, text="<html>")

    with pytest.raises(SweepError, match="expected OpenAI's list of models"):
        asyncio.run(Endpoint("http://server", transport=httpx2.MockTransport(html)).model())


def test_the_url_and_the_key() -> None:
    for url in ("http://server", "http://server/", "http://server/v1", "http://server/v1/"):
        assert Endpoint(url).url == "http://server/v1"
    assert Endpoint("http://s", "key").client.headers["Authorization"] == "Bearer key"
    assert client.Endpoint("http://s").client.headers.get("Authorization") is None
