"""Compile CUDA C++ kernels once, on first use, into a cached shared library with a C interface.

The library is named after a hash of its sources and of the compiler's flags, so a changed source is never served by an
old build. No PyTorch header is included: the build takes seconds and does not depend on PyTorch's version.
"""

from __future__ import annotations

import ctypes
import functools
import grp
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from kimi_k2.errors import KernelError

KERNELS = Path(__file__).parents[1]
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
FLAGS = ("-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler", "-fPIC")


def cache_directory() -> Path:
    """`$KIMI_K2_CACHE`, else `$XDG_CACHE_HOME/kimi_k2`, else `~/.cache/kimi_k2`."""
    if chosen := os.environ.get("KIMI_K2_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kimi_k2"


@functools.cache
def find_nvcc() -> str | None:
    """The CUDA compiler: on PATH, else under `$CUDA_HOME` or /usr/local/cuda, else the extra `cuda`'s; None if none."""
    packages = importlib.util.find_spec("nvidia")  # a namespace of NVIDIA's wheels
    wheels = packages.submodule_search_locations or () if packages else ()
    folders = [f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin", *(f"{one}/cu13/bin" for one in wheels)]
    return shutil.which("nvcc") or shutil.which("nvcc", path=os.pathsep.join(folders))


def source_of(library: str) -> Path:
    """The file of a library: "experts/fp8" is kernels/experts/csrc/fp8.cu."""
    folder, _, name = library.partition("/")
    return KERNELS / folder / "csrc" / f"{name}.cu"


def included(name: str, by: Path) -> Path:
    """The file that `by` includes under this name: one beside it, or else a path in kernels/."""
    beside = by.parent / name
    return beside if beside.exists() else KERNELS / name


def sources_of(library: str) -> set[Path]:
    """The library's file and every one of ours that it includes, directly or not."""
    sources: set[Path] = set()
    waiting = [source_of(library)]
    while waiting:
        path = waiting.pop()
        if path not in sources:
            sources.add(path)
            waiting += [included(name, path) for name in INCLUDE.findall(path.read_text(encoding="utf-8"))]
    return sources


def source_hash(library: str) -> str:
    """Hex digest over the flags and every file that the library is made of."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(sources_of(library)):
        digest.update(path.relative_to(KERNELS).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def build_library(library: str) -> Path:
    """The shared library's file, compiled if the cache lacks it; this needs no GPU and no driver.

    Args:
        library: folder and name, "experts/fp8" for kernels/experts/csrc/fp8.cu; a change to that file or to what it
            includes makes a new library.

    Raises:
        KernelError: there is no CUDA compiler, or it fails; its last lines are in the message.
    """
    target = cache_directory() / f"{library.replace('/', '-')}-{source_hash(library)}.so"
    if not target.exists():
        nvcc = find_nvcc()
        if nvcc is None:
            raise KernelError(f"compiling {library} needs nvcc on PATH or under CUDA_HOME: pip install 'kimi-k2[cuda]'")
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        # Compiled aside and renamed: another process never loads half a file.
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            built = Path(scratch) / target.name
            command = [nvcc, *FLAGS, f"-I{KERNELS}", "-o", str(built), str(source_of(library))]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise KernelError(f"nvcc could not compile {library}: {result.stderr[-2000:]}")
            built.replace(target)
    return target


@functools.cache
def load_library(library: str) -> ctypes.CDLL:
    """The shared library, as `build_library` has it, loaded.

    Raises:
        KernelError: it cannot be built or loaded, or may be another user's, see `check_private`.
    """
    target = build_library(library)
    check_private(target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise KernelError(f"{target}: cannot be loaded: {error}; if the file is damaged, remove it") from None


def _is_private(group: int) -> bool:
    """Whether a group is this user's alone, as many systems make one for each user: named after it."""
    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False


def check_private(target: Path) -> None:
    """Refuse a library that another user could have put there: loading it runs its code.

    Raises:
        KernelError: the file or its folder belongs to somebody else than this user or root, or others may write to it.
    """
    for path in (target.resolve(), target.resolve().parent):
        status = path.stat()
        if status.st_uid not in (os.geteuid(), 0):
            raise KernelError(f"{path}: belongs to user {status.st_uid}; set KIMI_K2_CACHE to a folder of your own")
        others = status.st_mode & (stat.S_IWOTH if _is_private(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP)
        # In a sticky folder nobody replaces another's files.
        if others and not (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX):
            raise KernelError(
                f"{path}: users other than its owner may write to it (mode {status.st_mode & 0o777:o});"
                " chmod go-w, or set KIMI_K2_CACHE to a folder of your own"
            )
