"""These tests need NxD and NxDI (source is enough: stand-ins replace their binary modules); else they are skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import environment

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs NxD, with one reason for all, which pytest's summary folds into one line with a count."""
    absent = environment.missing()
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.nxd)
        if absent and item.get_closest_marker("no_nxd_needed") is None:
            item.add_marker(pytest.mark.skip(reason=f"needs NxD and NxDI: {absent}"))


if environment.missing() is None:
    environment.prepare()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line that says how many tests were not run for lack of NxD."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "needs NxD and NxDI" in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests skipped for lack of NxD and NxDI ({environment.missing()})")
