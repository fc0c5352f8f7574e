"""Streamed completions of an OpenAI server, with the arrival time of every chunk."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.request import getproxies

import aiohttp

from kimi_k2.bench.errors import SweepError

Clock = Callable[[], float]
FAILED = (aiohttp.ClientError, OSError)  # no answer, or one that breaks off
_DATA = b"data:"


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
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        root = url.rstrip("/")
        self.url = root if root.endswith("/v1") else f"{root}/v1"
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The connections; made in the event loop that first asks for them."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self.headers,
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(limit=0),
                trust_env=bool(getproxies()),  # else each request would look for proxies
            )
        return self._session

    async def model(self) -> str:
        """The name of the first model that the server lists.

        Raises:
            SweepError: it does not answer as OpenAI's API does.
        """
        try:
            limit = aiohttp.ClientTimeout(total=30)
            async with self.session.get(f"{self.url}/models", timeout=limit) as answer:
                answer.raise_for_status()
                name = (await answer.json())["data"][0]["id"]
        except (*FAILED, ValueError, LookupError, TypeError) as error:
            raise SweepError(f"{self.url}/models: expected OpenAI's list of models: {error!r}") from None
        return str(name)

    async def chat(self, fields: dict[str, Any]) -> tuple[int, str]:
        """Status and text of the answer to a chat request that is not streamed.

        Raises:
            aiohttp.ClientError, OSError: there is none.
        """
        async with self.session.post(f"{self.url}/chat/completions", json=fields) as response:
            return response.status, await response.text(errors="replace")

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
            async with self.session.post(f"{self.url}/completions", json=fields) as response:
                if response.status != 200:
                    text = await response.text(errors="replace")
                    raise SweepError(f"{self.url}/completions: {response.status}: {text[:300]}")
                events = _Events()
                async for piece in response.content.iter_any():
                    for chunk in events.feed(piece):
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
        except FAILED as error:
            raise SweepError(f"{self.url}/completions: {error!r}") from None
        if answer.output_tokens != new_tokens:
            raise SweepError(f"the server made {answer.output_tokens} tokens, asked for {new_tokens}")
        return answer

    async def close(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class _Events:
    """The JSON of server-sent events, from the bytes of a stream as they come in."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, piece: bytes) -> list[dict[str, Any]]:
        """What the lines that now are whole say; none for comments, blank lines and the end."""
        *lines, self.rest = (self.rest + piece).split(b"\n")
        texts = [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]
        found = [json.loads(text) for text in texts if text not in (b"", b"[DONE]")]
        return [one for one in found if isinstance(one, dict)]


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
