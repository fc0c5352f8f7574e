"""The HTML report in a real browser without a network; skipped where there is no Chromium."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from kimi_k2.bench.render import write_reports
from kimi_k2.bench.sweep import Settings, run_sweep

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


def open_page(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page's DOM after loading, and what it wrote to the console; every host name fails to resolve."""
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_report_opens_without_network_and_console_errors(backend: Any, clock: Any, tmp_path: Path) -> None:
    results = run_sweep(Settings("tiny", "cpu", (3, 5), (4,)), backend, tmp_path / "sweep.json", clock=clock)
    write_reports(results, tmp_path, published=True)
    dom, console = open_page(tmp_path / "report.html", tmp_path / "profile")
    assert console == []
    assert "TPOT P50 / P90 / P99, ms" in dom and "published, not measured here" in dom
    broken = tmp_path / "broken.html"
    broken.write_text("<html><body><script>console.error('seen')</script></body></html>")
    assert len(open_page(broken, tmp_path / "profile")[1]) == 1  # an error would have been seen
