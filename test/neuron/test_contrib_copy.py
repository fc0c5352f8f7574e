"""The contrib folder as it would lie in NxDI's tree: its tests run there, or say what they lack."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

CONTRIB = Path(__file__).parents[2] / "contrib" / "models" / "Kimi-K2-Instruct-0905"


def run(tmp_path: Path, before: str, tests: str) -> str:
    """The report of pytest over `tests` of a copy, in a process of its own that first runs `before`."""
    copy = tmp_path / "neuronx-distributed-inference" / "contrib" / "models" / CONTRIB.name
    shutil.copytree(CONTRIB, copy, ignore=shutil.ignore_patterns("__pycache__"))
    code = f"import sys, pytest; {before}; sys.exit(pytest.main(['-rs', '-q', '-p', 'no:cacheprovider', '{tests}']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 5), done.stdout[-3000:]  # 5: nothing was collected
    return done.stdout


def test_without_the_package_the_tests_say_so(tmp_path: Path) -> None:
    report = run(tmp_path, "sys.modules['kimi_k2'] = None", "test")
    assert "2 skipped" in report, report
    assert report.count("needs the kimi_k2 package") == 2


def test_with_it_they_run(tmp_path: Path) -> None:
    report = run(tmp_path, "import kimi_k2", "test/integration")
    assert "6 skipped" in report, report
    assert "needs a trn2.48xlarge" in report
    assert "needs the kimi_k2 package" not in report
