"""What `kimi-k2 bench --endpoint` and vLLM's benchmark client measure of the same answers of a live server.

    python scripts/compare_serving_clients.py http://localhost:8000/v1 NAME --vocab 500

Two runs of a benchmark differ by what else the machine does. Here both clients send each prompt to a relay, which asks
the server once and hands every piece of its answer to both. Needs vllm and aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from typing import TYPE_CHECKING, Any

from kimi_k2.bench.endpoint.client import Answer, Endpoint
from kimi_k2.bench.endpoint.load import METRICS, summarize

if TYPE_CHECKING:
    from aiohttp import web


class Relay:
    """Asks `url` once for every two requests of the same body, and streams what comes to both."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.first: dict[str, asyncio.Future[asyncio.Queue[bytes | None]]] = {}

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """One of the two: the first waits for the second, which asks the server."""
        import aiohttp
        from aiohttp import web

        body = json.loads(await request.text())
        key = json.dumps(body["prompt"])
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if key not in self.first:
            waiting = self.first[key] = asyncio.get_running_loop().create_future()
            pieces = await waiting
            await response.prepare(request)
            while (piece := await pieces.get()) is not None:
                await response.write(piece)
            return response
        pieces = asyncio.Queue()
        self.first.pop(key).set_result(pieces)
        await response.prepare(request)
        async with aiohttp.ClientSession() as session, session.post(f"{self.url}/completions", json=body) as answer:
            answer.raise_for_status()
            async for piece in answer.content.iter_any():
                pieces.put_nowait(piece)
                await response.write(piece)
        pieces.put_nowait(None)
        return response


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Means and medians, in milliseconds, and requests a second: of our client, and of vLLM's."""
    import aiohttp
    from aiohttp import web
    from vllm.benchmarks.datasets import SampleRequest
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions
    from vllm.benchmarks.serve import calculate_metrics

    application = web.Application(client_max_size=2**26)
    application.router.add_post("/v1/completions", Relay(options.url).completions)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    relay = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    endpoint, free, draw = Endpoint(relay), asyncio.Semaphore(options.concurrency), random.Random(0)

    async with aiohttp.ClientSession() as session:

        async def both(prompt: list[int]) -> tuple[Answer, Any]:
            fields = {"temperature": 0}
            asked = RequestFuncInput(
                prompt, f"{relay}/completions", len(prompt), options.output, options.model, ignore_eos=True,
                extra_body=fields,
            )  # fmt: skip
            async with free:
                ours = endpoint.complete(options.model, prompt, options.output)
                theirs = async_request_openai_completions(asked, session)
                pair = [ours, theirs] if draw.random() < 0.5 else [theirs, ours]  # neither is always the first
                found = await asyncio.gather(*pair)
            one, two = found if pair[0] is ours else reversed(found)
            return one, two

        prompts = [[draw.randrange(options.vocab) for _ in range(options.input)] for _ in range(options.requests)]
        await asyncio.gather(*(both([*prompt, 0]) for prompt in prompts[: options.concurrency]))  # connections
        start = time.perf_counter()
        pairs = await asyncio.gather(*map(both, prompts))
        duration = time.perf_counter() - start
    await endpoint.close()
    await runner.cleanup()
    ours = summarize([one for one, _ in pairs], duration)
    asked = [SampleRequest(prompt="", prompt_len=options.input, expected_output_len=options.output)] * len(pairs)
    theirs, _ = calculate_metrics(asked, [two for _, two in pairs], duration, None, [99], {})
    table = {
        f"{kind} {name}": (ours[name][kind] * 1000, float(getattr(theirs, f"{kind}_{name}_ms")))
        for name in METRICS
        for kind in ("mean", "median")
    }
    return {**table, "output tokens/s": (ours["output_throughput"], float(theirs.output_throughput))}


def main() -> None:
    """Print one line a figure: ours, vLLM's, and how far ours is from it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of the server, with /v1")
    parser.add_argument("model", help="as the server calls it")
    parser.add_argument("--vocab", type=int, required=True, help="prompts are drawn below it")
    for name, default in (("requests", 48), ("concurrency", 4), ("input", 64), ("output", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, (one, two) in asyncio.run(measure(parser.parse_args())).items():
        sys.stdout.write(f"{name:16} {one:9.2f} {two:9.2f} {(one / two - 1) * 100:+6.2f} %\n")


if __name__ == "__main__":
    main()
