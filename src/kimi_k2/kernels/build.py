"""Compile CUDA C++ kernels once, on first use, into a cached shared library with a C interface.

The library is named after a hash of its sources and of the compiler's flags, so a changed source is never served by an
old build. No PyTorch header is included: the build takes seconds and does not depend on PyTorch's version.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from kimi_k2.errors import KernelError

SOURCES = Path(__file__).parent / "csrc"
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC")


def cache_directory() -> Path:
    """`$KIMI_K2_CACHE`, else `$XDG_CACHE_HOME/kimi_k2`, else `~/.cache/kimi_k2`."""
    if chosen := os.environ.get("KIMI_K2_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kimi_k2"


@functools.cache
def find_nvcc() -> str | None:
    """The CUDA compiler: on PATH, else under `$CUDA_HOME` or /usr/local/cuda; None if there is none."""
    if found := shutil.which("nvcc"):
        return found
    candidate = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
    return str(candidate) if candidate.exists() else None


def sources_of(source: str) -> set[Path]:
    """csrc/`source` and every file there that it includes, directly or not."""
    found: set[Path] = set()
    waiting = [SOURCES / source]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += [SOURCES / name for name in INCLUDE.findall(path.read_text(encoding="utf-8"))]
    return found


def source_hash(source: str) -> str:
    """Hex digest over the flags and every file that csrc/`source` is made of."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(sources_of(source)):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def load_library(source: str) -> ctypes.CDLL:
    """The shared library of `csrc/<source>`, compiled if the cache lacks it.

    Args:
        source: file name in csrc/; a change to it or to what it includes makes a new library.

    Raises:
        KernelError: there is no CUDA compiler, or it fails; its last lines are in the message.
    """
    target = cache_directory() / f"{Path(source).stem}-{source_hash(source)}.so"
    if not target.exists():
        nvcc = find_nvcc()
        if nvcc is None:
            raise KernelError(f"compiling {source} needs nvcc on PATH or under CUDA_HOME")
        target.parent.mkdir(parents=True, exist_ok=True)
        # Compiled aside and renamed: another process never loads half a file.
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            command = [nvcc, *FLAGS, "-o", str(built), str(SOURCES / source)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise KernelError(f"nvcc could not compile {source}: {result.stderr[-2000:]}")
            built.replace(target)
    return ctypes.CDLL(str(target))
