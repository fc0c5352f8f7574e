"""A load on a server as a Markdown table and as one HTML page, in the form of the sweep's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2

from kimi_k2.bench.endpoint.load import METRICS
from kimi_k2.bench.render import markdown_table

HEADER = [
    "input", "concurrency", "output", *(f"{name.upper()}, ms" for name in METRICS), "requests/s", "output tok/s",
    "total tok/s",
]  # fmt: skip
READING = "Of each time: mean, median, P99."


def rows(results: dict[str, Any]) -> list[list[str]]:
    """The table's cells as text."""
    table = []
    for cell in results["cells"]:
        shape = [str(cell[name]) for name in ("input", "concurrency", "output")]
        if cell["status"] != "ok":
            table.append([*shape, "failed", *[""] * (len(HEADER) - 4)])
            continue
        summary = cell["summary"]
        times = [_three(summary.get(name)) for name in METRICS]
        rates = [f"{summary[name]:.2f}" for name in ("request_throughput", "output_throughput")]
        table.append([*shape, *times, *rates, f"{summary['total_token_throughput']:.2f}"])
    return table


def _three(found: dict[str, float] | None) -> str:
    return "" if found is None else ", ".join(f"{found[name] * 1e3:.2f}" for name in ("mean", "median", "p99"))


def failures(results: dict[str, Any]) -> list[str]:
    """One line for each cell that failed."""
    return [
        f"input {cell['input']}, concurrency {cell['concurrency']}, output {cell['output']}: {cell['error']}"
        for cell in results["cells"]
        if cell["status"] != "ok"
    ]


def description(results: dict[str, Any]) -> str:
    """One line on what was asked."""
    settings = results["settings"]
    return (
        f"{settings['served']} behind an OpenAI server, {settings['runs']} requests for each of the concurrency after"
        f" {settings['warmup']} untimed, greedy, end tokens ignored. {READING}"
    )


def markdown(results: dict[str, Any]) -> str:
    """The report in Markdown."""
    parts = [f"{description(results)}\n", markdown_table(HEADER, rows(results))]
    if failed := failures(results):
        parts.append("\n".join(f"- {line}" for line in failed) + "\n")
    return "\n".join(parts)


def write_reports(results: dict[str, Any], directory: Path) -> list[Path]:
    """Write serving.md and serving.html into `directory`; returns what was written."""
    loader = jinja2.FileSystemLoader(Path(__file__).parents[1])
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("report.html.jinja").render(
        description=description(results), header=HEADER, rows=rows(results), failures=failures(results), images=[],
        published=[], published_label="", published_header=[], settings=results["settings"],
        environment=results["environment"],
    )  # fmt: skip
    written = [directory / "serving.md", directory / "serving.html"]
    written[0].write_text(markdown(results), encoding="utf-8")
    written[1].write_text(page, encoding="utf-8")
    return written
