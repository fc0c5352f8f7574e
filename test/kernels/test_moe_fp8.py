"""Libraries of kernels: which sources make one anew, and the compiler that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common import build


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
