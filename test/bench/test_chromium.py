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


def open_page(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The page's DOM after loading, and what it wrote to the console; every host name fails to resolve."""
    command = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--enable-logging=stderr", "--dump-dom",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}", *flags, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_report_opens_without_network_and_console_errors(backend: Any, clock: Any, tmp_path: Path) -> None:
    results = run_sweep(Settings("tiny", "cpu", (3, 5), (4,)), backend, tmp_path / "sweep.json", clock=clock)
    write_reports(results, tmp_path)
    dom, console = open_page(tmp_path / "report.html", tmp_path / "profile")
    assert console == []
    assert "TPOT, ms" in dom
    broken = tmp_path / "broken.html"
    broken.write_text("<html><body><script>console.error('seen')</script></body></html>")
    assert len(open_page(broken, tmp_path / "profile")[1]) == 1  # an error would have been seen


@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_is_wider_than_the_page(backend: Any, clock: Any, tmp_path: Path, width: int) -> None:
    """No table scrolls sideways, on a phone or a desk, with times of many digits."""
    slow = run_sweep(Settings("tiny", "cpu", (3, 5), (4,), runs=3), backend, tmp_path / "sweep.json", clock=clock)
    for cell in slow["cells"]:
        cell["runs"] = [{"ttft": 12.3456 + n, "itl": [3.4567 * (n + 1)] * len(run["itl"])}
                        for n, run in enumerate(cell["runs"])]  # fmt: skip
    write_reports(slow, tmp_path)
    page = tmp_path / "report.html"
    # A frame has a phone's width exactly; the window of a headless browser has a least one.
    (tmp_path / "frame.html").write_text(
        f"""<iframe id="f" src="report.html" style="width:{width}px;height:2000px;border:0"></iframe><script>
        document.getElementById("f").onload = e => {{
          const d = e.target.contentDocument;
          const wide = [d.documentElement, ...d.querySelectorAll(".wide")].filter(x => x.scrollWidth > x.clientWidth);
          document.title = "inner " + d.documentElement.clientWidth + " too wide " + wide.length;
        }}</script>"""
    )
    assert page.is_file()
    dom, _ = open_page(tmp_path / "frame.html", tmp_path / "profile", "--allow-file-access-from-files")
    assert f"<title>inner {width} too wide 0</title>" in dom
