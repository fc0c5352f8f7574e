"""The list of libraries to compile ahead is what the modules load."""

from __future__ import annotations

import re

import pytest

from kimi_k2.kernels.common import build, libraries


def test_every_library_that_a_module_loads_is_listed() -> None:
    asked = set()
    for path in build.KERNELS.glob("*/*.py"):
        asked |= set(re.findall(r'\b(?:launch|load_library)\(\s*"([\w/]+)"', path.read_text()))
    assert asked == set(libraries.LIBRARIES)
    for library in libraries.LIBRARIES:
        assert 'extern "C"' in build.source_of(library).read_text()


def test_all_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    monkeypatch.setattr(libraries, "load_library", built.append)
    times = libraries.build_all(2)
    assert sorted(built) == sorted(libraries.LIBRARIES)
    assert all(seconds >= 0 for seconds in times.values())
