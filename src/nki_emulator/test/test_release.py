"""What the emulator refuses of a running kernel for a release of NKI; `test_check.py` has what its source breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nki_emulator.errors import NkiError
from nki_emulator.settings import settings


def result(data: Any, buffer: Any) -> Any:
    out = nl.ndarray(data.shape, dtype=data.dtype, buffer=buffer)
    nisa.dma_copy(dst=out, src=data)
    return out


# (kernel, releases that refuse it, words of the error)
CASES: dict[str, tuple[Callable[[Any], Any], tuple[str, ...], str]] = {
    "permute": (lambda data: nl.zeros((128, 4), nl.float32).permute((0, 1)), ("0.3", "0.4"), "comes with NKI 0.5"),
    "select": (lambda data: data.select(0, 1), ("0.3", "0.4"), "comes with NKI 0.5"),
    "ap on a slice": (lambda data: data[1:].ap([[1, 1]]), ("0.3", "0.4", "0.5", "0.7"), "a whole tensor"),
    "result": (lambda data: result(data, nl.private_hbm), ("0.3", "0.4", "0.5", "0.7"), "in nl.shared_hbm"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_release_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, refused, words = CASES[name]

    def kernel(data: Any) -> Any:
        out = body(data)
        return out if name == "result" else result(data, nl.shared_hbm)

    for release in (None, "0.3", "0.4", "0.5", "0.7"):
        monkeypatch.setattr(settings, "release", release)
        if release in refused:
            with pytest.raises(NkiError, match=words):
                nki.jit(kernel)(np.zeros((128, 4), np.float32))
        else:
            nki.jit(kernel)(np.zeros((128, 4), np.float32))


def test_arguments_are_tuples_before_python_runs_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(data: Any, sizes: Any) -> Any:
        return result(data, nl.shared_hbm)

    data = np.zeros((128, 4), np.float32)
    for release, refused in (("0.3", True), ("0.6", True), ("0.7", False), (None, False)):
        monkeypatch.setattr(settings, "release", release)
        nki.jit(kernel)(data, (1, (2,)))
        if refused:
            with pytest.raises(NkiError, match="tuples, no lists"):
                nki.jit(kernel)(data, (1, [2]))
        else:
            nki.jit(kernel)(data, (1, [2]))
