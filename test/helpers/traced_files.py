"""Our source files on the call path of something: what its reader has to open."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import kimi_k2

ROOT = f"{Path(kimi_k2.__file__).parent}/"


@contextmanager
def traced() -> Iterator[set[str]]:
    """Files, below the package, in which a function is called meanwhile, in threads that begin meanwhile too."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            files.add(frame.f_code.co_filename.removeprefix(ROOT))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
