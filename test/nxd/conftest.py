"""These tests need NxD and NxDI (source is enough: stand-ins replace their binary modules); else they are skipped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import environment
from cases import Stored, write

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs NxD, with one reason for all, which the summary counts in one line."""
    absent = environment.missing()
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.nxd)
        if absent:
            item.add_marker(pytest.mark.skip(reason=f"needs NxD and NxDI: {absent}"))


if environment.missing() is None:
    environment.prepare()


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Serving sets the runtime's variables, which the next test is not to find."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The directory of a tiny checkpoint: `stored(seed=3, **fields)`, see cases.write."""
    root, written = tmp_path_factory.mktemp("stored"), dict[str, Path]()

    def of(**source: Any) -> Path:
        name = repr(sorted(source.items()))
        if name not in written:
            written[name] = write(root / str(len(written)), **source)
        return written[name]

    return of
