"""These tests need NxD and NxDI (source is enough: stand-ins replace their binary modules); else they are skipped."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import environment

from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

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


@pytest.fixture(scope="session")
def long_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in BF16, three layers, positions up to 262144."""
    directory = tmp_path_factory.mktemp("long")
    write_synthetic_checkpoint(directory, with_format(tiny_config(max_position_embeddings=262144), "bf16"), seed=7)
    return directory


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line that says how many tests were not run for lack of NxD."""
    skipped = [r for r in terminalreporter.stats.get("skipped", []) if "needs NxD and NxDI" in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests skipped for lack of NxD and NxDI ({environment.missing()})")
