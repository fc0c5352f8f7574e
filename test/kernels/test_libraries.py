"""Libraries of kernels: the list to compile ahead, sources that make one anew, the compiler that is not there."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common import build, libraries
from kimi_k2.kernels.experts.w4a16_layout import FORMATS


def test_every_library_that_a_module_loads_is_listed() -> None:
    asked = set()
    for path in build.KERNELS.glob("*/*.py"):
        asked |= set(re.findall(r'\b(?:launch|launch_product|load_library)\(\s*"([\w/]+)"', path.read_text()))
    asked |= {one.library for one in FORMATS}
    assert asked == set(libraries.LIBRARIES)
    for library in libraries.LIBRARIES:
        assert 'extern "C"' in build.source_of(library).read_text()


@pytest.mark.parametrize(
    ("folder", "file", "owner", "says"),
    [
        (0o755, 0o755, 0, None),
        (0o1777, 0o644, 0, None),  # in /tmp itself
        (0o777, 0o644, 0, "cache: users other than its owner may write"),
        (0o755, 0o666, 0, "lib.so: users other than its owner may write"),
        (0o755, 0o644, 1, "lib.so: belongs to user"),
    ],
)
def test_a_library_that_others_could_have_put_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: int, file: int, owner: int, says: str | None
) -> None:
    library = tmp_path / "cache" / "lib.so"
    library.parent.mkdir()
    library.write_bytes(b"")
    library.chmod(file)
    library.parent.chmod(folder)
    if owner and os.geteuid() == 0:
        os.chown(library, 4321, -1)
    elif owner:
        monkeypatch.setattr(os, "geteuid", lambda: 4321)
    (tmp_path / "link.so").symlink_to(library)
    for path in (library, tmp_path / "link.so"):
        if says is None:
            build.check_private(path)
        else:
            with pytest.raises(KernelError, match=says):
                build.check_private(path)


def test_source_hash_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files beside the one that includes them, and files of another folder."""
    monkeypatch.setattr(build, "KERNELS", tmp_path)
    texts = {
        "a/csrc/moe_a.cu": '#include "one.cuh"\n#include <cuda.h>\n',
        "a/csrc/one.cuh": '#include "b/csrc/two.cuh"\n',
        "b/csrc/two.cuh": "two",
        "b/csrc/one.cuh": "not this one",
        "a/csrc/other.cuh": "other",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    hashes = [build.source_hash("a/moe_a")]
    for name in ("a/csrc/moe_a.cu", "a/csrc/one.cuh", "b/csrc/two.cuh"):
        path = tmp_path / name
        path.write_text(path.read_text() + "// changed\n")
        hashes.append(build.source_hash("a/moe_a"))
    assert len(set(hashes)) == 4
    for name in ("a/csrc/other.cuh", "b/csrc/one.cuh"):
        (tmp_path / name).write_text("changed")
    assert build.source_hash("a/moe_a") == hashes[-1]


def test_missing_compiler_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_K2_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "find_nvcc", lambda: None)
    build.load_library.cache_clear()
    with pytest.raises(KernelError, match="nvcc"):
        build.load_library("experts/fp8")


def test_all_are_built_and_not_loaded_ahead_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image is made where there is no driver: what the compiler writes cannot be loaded there, and is kept."""
    monkeypatch.setenv("KIMI_K2_CACHE", str(tmp_path))
    compiler = tmp_path / "nvcc"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho damaged > "$2"\n')
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "find_nvcc", lambda: str(compiler))
    assert sorted(libraries.build_all(2)) == sorted(libraries.LIBRARIES)
    assert len(list(tmp_path.glob("*.so"))) == len(libraries.LIBRARIES)
    build.load_library.cache_clear()
    with pytest.raises(KernelError, match=f"{tmp_path}/attention-query-.*so: cannot be loaded: .*remove it"):
        build.load_library("attention/query")


def test_an_empty_cache_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("KIMI_K2_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, "")
    assert build.cache_directory() == Path.home() / ".cache" / "kimi_k2"
