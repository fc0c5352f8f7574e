"""Streamed completions of an OpenAI server, with the arrival time of every chunk."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from kimi_k2.bench.errors import SweepError

Clock = Callable[[], float]
_DATA = "data:"


@dataclass
class Answer:
    """One request, timed as `vllm bench serve` times it; seconds.

    Attributes:
        ttft: from sending to the first chunk with a choice.
        itl: gaps between chunks; a server may put several tokens into one.
        latency: from sending to the last chunk with a choice.
        prompt_tokens, output_tokens: as the server counts them.
    """

    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0

    @property
    def tpot(self) -> float | None:
        """Seconds an output token after the first; None if there is none."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Endpoint:
    """A server under `url`, which ends in /v1 (it is added if missing).

    Args:
        api_key: sent as a bearer token; None for none.
        transport: of httpx2, for tests.
    """

    def __init__(
        self, url: str, api_key: str | None = None, transport: httpx2.AsyncBaseTransport | None = None
    ) -> None:
        root = url.rstrip("/")
        self.url = root if root.endswith("/v1") else f"{root}/v1"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self.client = httpx2.AsyncClient(headers=headers, timeout=None, limits=limits, transport=transport)

    async def model(self) -> str:
        """The name of the first model that the server lists.

        Raises:
            SweepError: it does not answer as OpenAI's API does.
        """
        try:
            answer = await self.client.get(f"{self.url}/models", timeout=30)
            answer.raise_for_status()
            name = answer.json()["data"][0]["id"]
        except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise SweepError(f"{self.url}/models: expected OpenAI's list of models: {error!r}") from None
        return str(name)

    async def complete(
        self, model: str, prompt: Sequence[int], new_tokens: int, clock: Clock = time.perf_counter
    ) -> Answer:
        """Exactly `new_tokens` greedy tokens for a prompt of token ids, end tokens ignored.

        Raises:
            SweepError: the server refuses, breaks off, or makes another number of tokens.
        """
        fields = {
            "model": model, "prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        answer, start = Answer(), clock()
        last: float | None = None
        try:
            async with self.client.stream("POST", f"{self.url}/completions", json=fields) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    raise SweepError(f"{self.url}/completions: {response.status_code}: {text[:300]}")
                async for line in response.aiter_lines():
                    chunk = _chunk(line)
                    if chunk is None:
                        continue
                    if chunk.get("error"):
                        raise SweepError(f"{self.url}/completions: {str(chunk['error'])[:300]}")
                    if chunk.get("choices"):
                        now = clock()
                        if last is None:
                            answer.ttft = now - start
                        else:
                            answer.itl.append(now - last)
                        last = now
                        answer.latency = now - start
                    if usage := chunk.get("usage"):
                        answer.prompt_tokens = usage.get("prompt_tokens") or 0
                        answer.output_tokens = usage.get("completion_tokens") or 0
        except httpx2.HTTPError as error:
            raise SweepError(f"{self.url}/completions: {error!r}") from None
        if answer.output_tokens != new_tokens:
            raise SweepError(f"the server made {answer.output_tokens} tokens, asked for {new_tokens}")
        return answer

    async def close(self) -> None:
        """End all connections."""
        await self.client.aclose()


def _chunk(line: str) -> dict[str, Any] | None:
    """The JSON of one server-sent event's line; None for its other lines and for the end."""
    if not line.startswith(_DATA):
        return None
    text = line[len(_DATA) :].strip()
    if text in ("", "[DONE]"):
        return None
    found = json.loads(text)
    return found if isinstance(found, dict) else None


async def at_once(
    endpoint: Endpoint, model: str, prompts: Sequence[Sequence[int]], new_tokens: int, concurrency: int
) -> tuple[list[Answer], float]:
    """All prompts, `concurrency` at a time, and the seconds from the first request to the last answer.

    Raises:
        SweepError: a request failed; the others are given up.
    """
    free = asyncio.Semaphore(concurrency)

    async def one(prompt: Sequence[int]) -> Answer:
        async with free:
            return await endpoint.complete(model, prompt, new_tokens)

    start = time.perf_counter()
    tasks = [asyncio.create_task(one(prompt)) for prompt in prompts]
    try:
        answers = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return answers, time.perf_counter() - start
