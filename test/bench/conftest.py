"""A backend and a clock under the test's control, so that no test depends on how fast the machine is; a server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from aiohttp import web

from kimi_k2.bench.backend import Prompts

Handler = Callable[[web.Request], Awaitable[web.Response]]


class FakeClock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeBackend:
    """Prefill takes `first` seconds, decode step i takes `steps[i % len(steps)]`."""

    name = "cpu"
    vocab_size = 1000

    def __init__(self, clock: FakeClock, first: float = 5.0, steps: tuple[float, ...] = (1.0, 3.0)) -> None:
        self.clock, self.first, self.steps = clock, first, steps
        self.details: dict[str, Any] = {"dtype": "float32"}
        self.calls: list[tuple[int, int, int]] = []
        self.fail_at: int | None = None

    def generate(self, prompts: Prompts, new_tokens: int) -> Iterator[None]:
        self.calls.append((len(prompts[0]), len(prompts), new_tokens))
        if new_tokens == self.fail_at:
            raise RuntimeError("CUDA out of memory. Tried to read /some/place/model.bin\nlong trace")
        self.clock.now += self.first
        yield
        for step in range(new_tokens - 1):
            self.clock.now += self.steps[step % len(self.steps)]
            yield

    def reset_peak_memory(self) -> None:
        pass

    def peak_memory(self) -> tuple[int | None, str]:
        return 123, "made up"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def backend(clock: FakeClock) -> FakeBackend:
    return FakeBackend(clock)


@contextmanager
def serving(handler: Handler) -> Iterator[str]:
    """The URL of a server in a thread that answers every request by `handler`."""
    loop, ports, started = asyncio.new_event_loop(), list[int](), threading.Event()

    async def start() -> web.AppRunner:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ports.append(runner.addresses[0][1])
        started.set()
        return runner

    def run() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    """Starts a server of a handler and gives its URL; all end with the test."""
    with ExitStack() as servers:
        yield lambda handler: servers.enter_context(serving(handler))
