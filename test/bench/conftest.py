"""A backend and a clock under the test's control, so that no test depends on how fast the machine is; a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kimi_k2.bench.backend import Prompts

Handler = Callable[[str, str | None, Any], tuple[int, str]]  # path, authorization, fields: status, text


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
    """The URL of a server in threads that answers every request by `handler`."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, text = handler(self.path, self.headers["Authorization"], json.loads(body or "null"))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def serve() -> Iterator[Callable[[Handler], str]]:
    """Starts a server of a handler and gives its URL; all end with the test."""
    with ExitStack() as servers:
        yield lambda handler: servers.enter_context(serving(handler))
