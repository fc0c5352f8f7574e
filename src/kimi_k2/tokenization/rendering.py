"""The process that `renderer` starts: reads templates and variables, writes texts and whose they are."""

from __future__ import annotations

import json
import marshal
import resource
import signal
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from kimi_k2.tokenization.environment import ChatEnvironment
from kimi_k2.tokenization.renderer import HEAD
from kimi_k2.tokenization.traced import own_spans, traced, written


@lru_cache(8)
def _compiled(source: str) -> jinja2.Template:
    return ChatEnvironment().from_string(source)


def _rendered(source: str, variables: dict[str, Any] | None, own: dict[str, str]) -> dict[str, Any]:
    template = _compiled(source)
    if variables is None:
        return {"text": "", "own": []}
    values = traced(variables)
    for message in values["messages"]:
        message["role"] = written(message["role"])  # one of a few words, and part of markup in some templates
    text = template.render({**{name: written(value) for name, value in own.items()}, **values})
    return {"text": text, "own": own_spans(text)}


def _reply(request: bytes) -> bytes:
    try:
        return json.dumps(_rendered(*marshal.loads(request))).encode()
    except MemoryError:
        problem = "it takes too much memory"
    except RecursionError:
        problem = "it nests or calls itself too deeply"
    except Exception as error:  # all that Python can raise, a template can make it raise
        problem = str(error) or type(error).__name__
    return json.dumps({"error": problem}).encode()


def _limit(seconds: float, memory: int) -> None:
    # SIGPROF ends a process that has no handler for it, whatever it does.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if memory:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))


def _taken() -> int:
    """Bytes of address space that this process has now; 0 where the system does not say."""
    statistics = Path("/proc/self/statm")
    return int(statistics.read_text().split()[0]) * resource.getpagesize() if statistics.exists() else 0


def serve() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    taken = _taken()
    while head := requests.read(HEAD.size):
        seconds, memory, size = HEAD.unpack(head)
        request = requests.read(size)
        _limit(seconds, taken and taken + memory)
        reply = _reply(request)
        _limit(0.0, 0)
        replies.write(len(reply).to_bytes(8, "big") + reply)
        replies.flush()
