"""A backend and a clock under the test's control, so that no test depends on how fast the machine is; a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from server import Handler, serving

from kimi_k2.bench.backend import Prompts


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


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    """Starts a server of a handler and gives its URL; all end with the test."""
    with ExitStack() as servers:
        yield lambda handler: servers.enter_context(serving(handler))
