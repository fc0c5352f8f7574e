"""Templates and tools' schemas in a process of their own, which the operating system ends at its limits.

A template is a program of whoever made the checkpoint. Jinja's sandbox keeps it from Python, not from loops in loops,
from `'a' * 10**10`, or from one call into C that takes minutes; only the system can end those. A
schema is a client's, and may be made to run as long. The process imports Jinja, jsonschema where a schema comes, and
nothing else of weight; it is started when the first comes, and serves all of this process.
"""

from __future__ import annotations

import atexit
import json
import marshal
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO, Any

from kimi_k2.errors import TokenizerError

# CPU time of one rendering, beside a second for each million characters of input. A published template takes about
# 0.1 s for a thousand messages.
MAX_SECONDS = 1.0
# Bytes of memory beside what Python and Jinja take (on Linux), and beside so many for each of input.
MAX_MEMORY, MEMORY_A_BYTE = 2**28, 128
# Bytes of what it writes, beside so many times its input.
MAX_WRITTEN, WRITTEN_A_BYTE = 2**23, 16
# Before a request: seconds, bytes of memory, bytes of the request.
HEAD = struct.Struct("=dqq")


class _Renderer:
    """The process, started when it is needed and again after it was ended; threads take turns."""

    def __init__(self) -> None:
        self._forget()
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """A fork of this process must not talk to the same one."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, seconds: float, memory: int, most: int, request: bytes) -> dict[str, str] | list[Any] | int:
        """The reply to a request, or the status with which the process ended.

        Raises:
            TokenizerError: the reply has more than `most` bytes.
        """
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(HEAD.pack(seconds, memory, len(request)) + request)
                process.stdin.flush()
                size = int.from_bytes(_read(process.stdout, 8), "big")
                if size > most:
                    raise TokenizerError(f"it writes more than {most} bytes")
                reply: dict[str, str] | list[Any] = json.loads(_read(process.stdout, size))
            except (EOFError, BrokenPipeError):
                return process.wait()
            except BaseException:  # the rest of a reply must not be taken for the next one's
                _end(process)
                raise
            return reply

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from kimi_k2.tokenization import rendering; rendering.serve()"
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the terminal's ^C is not for it
            )
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            _end(self._process)


_RENDERER = _Renderer()


@atexit.register
def close() -> None:
    """End the process; another one is started when it is needed."""
    _RENDERER.close()


def render(
    source: str,
    variables: dict[str, Any] | None = None,
    *,
    own: dict[str, str] | None = None,
    names: Sequence[str] = (),
    seconds: float = MAX_SECONDS,
) -> list[tuple[str, bool]]:
    """Render a template, or, without variables, only compile it.

    Args:
        source: Jinja source.
        variables: plain data: text, numbers, None, and lists, tuples and objects of them.
        own: more variables, text that counts as the template's own.
        names: of special tokens, of which one is found before those that come after it.
        seconds: CPU time that it may take, where that is less than MAX_SECONDS.

    Returns:
        What it writes in pieces, each with whether it is a special token that the template's own source wrote.

    Raises:
        TokenizerError: it goes beyond a limit, nests too deeply, fails in any way a template can fail, or treats its
            special tokens so that whose they are cannot be told.
    """
    return [(text, own) for text, own in _asked(tuple(names), (source, variables, own or {}), seconds) if text]


def schema_problems(arguments: Any, schemas: list[Any]) -> list[str | None]:
    """Of each schema why it refuses arguments, in a few words; None if it takes them.

    Raises:
        TokenizerError: together they go beyond a limit of time or memory, or nest too deeply.
    """
    return _asked(None, (arguments, schemas), MAX_SECONDS)


def _asked(names: tuple[str, ...] | None, given: tuple[Any, ...], seconds: float) -> list[Any]:
    """What the process makes of plain data: of a template with the names of special tokens, or of schemas without."""
    try:
        data = marshal.dumps(given)
    except ValueError:  # deeper than 2000
        raise TokenizerError("messages or tools: nested too deeply") from None
    seconds = min(seconds, MAX_SECONDS) + len(data) * 1e-6
    memory, most = MAX_MEMORY + MEMORY_A_BYTE * len(data), MAX_WRITTEN + WRITTEN_A_BYTE * len(data)
    reply = _RENDERER.ask(seconds, memory, most, marshal.dumps((names, data)))
    if reply == -signal.SIGPROF:
        raise TokenizerError(f"it takes more than {seconds:.2g} s of CPU time")
    if isinstance(reply, int):
        raise TokenizerError(f"it ended its process with status {reply}")
    if isinstance(reply, dict):
        raise TokenizerError(reply["error"])
    return reply


def _read(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
