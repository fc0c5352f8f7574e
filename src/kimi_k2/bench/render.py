"""A sweep as a Markdown table with plots."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kimi_k2.bench.results import SHAPE, rates, series
from kimi_k2.charts import chart
from kimi_k2.files import Json, replace_file

HEADER = [
    "prompt", "batch", "output", "TTFT, ms", "TPOT, ms", "ITL, ms", "end to end, ms", "tok/s a sequence",
    "tok/s total", "peak memory, GB",
]  # fmt: skip
SERIES = ("ttft", "tpot", "itl", "e2e")
# A percentile says something of the tail once values lie beyond it.
ENOUGH = {90: 10, 99: 100}
READING = (
    "Times are medians. Beside them stand P90 from 10 values on and P99 from 100 on; of fewer, the least and the"
    " greatest. ITL counts every gap of every run, the others count runs."
)


def spread(seconds: Sequence[float]) -> str:
    """The median in milliseconds, with the percentiles that so many values support, else their range."""
    middle = f"{statistics.median(seconds) * 1e3:.2f}"
    tail = [f"P{p} {np.percentile(seconds, p) * 1e3:.2f}" for p, count in ENOUGH.items() if len(seconds) >= count]
    if tail:
        return ", ".join([middle, *tail])
    if len(seconds) == 1:
        return middle
    return f"{middle} ({min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f})"


def rows(results: Json) -> list[list[str]]:
    """The table's cells as text, one row a cell of the sweep."""
    table = []
    for cell in results["cells"]:
        shape = [str(cell[name]) for name in SHAPE]
        if cell["status"] != "ok":
            table.append([*shape, "failed", *[""] * (len(HEADER) - 4)])
            continue
        peak, values = cell["peak_memory"]["bytes"], series(cell["runs"])
        table.append(
            [
                *shape,
                *(spread(values[name]) for name in SERIES),
                *(f"{rate:.1f}" for rate in rates(cell)),
                "" if peak is None else f"{peak / 1e9:.2f}",
            ]
        )
    return table


def markdown_table(header: list[str], body: list[list[str]]) -> str:
    """A GitHub table."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def markdown(results: Json) -> str:
    """The whole report in Markdown: what ran where, and the table."""
    paragraphs = [f"{description(results)}\n", markdown_table(HEADER, rows(results))]
    paragraphs += [
        "- prompt {prompt_length}, batch {batch_size}, output {output_length}: {error}\n".format(**cell)
        for cell in results["cells"]
        if cell["status"] != "ok"
    ]
    return "\n".join(paragraphs)


def description(results: Json) -> str:
    """One line on model, backend, device and runs."""
    settings, environment = results["settings"], results["environment"]
    device = environment.get("gpu") if settings["backend"] == "cuda" else environment.get("preset")
    where = device or environment.get("cpu") or environment["system"]
    return (
        f"{settings['model']} on {settings['backend']} ({where}), {settings['runs']} runs after 1"
        f" warm-up, end tokens ignored, commit {environment['commit']}. TPOT is without the first token."
        f" {READING}"
    )


def plots(results: Json, directory: Path) -> list[Path]:
    """Write tpot.png, ttft.png and throughput.png; none where no cell finished."""
    cells = [cell for cell in results["cells"] if cell["status"] == "ok"]
    if not cells:
        return []
    written = []
    for name, title, key, label in (
        ("tpot", "time an output token after the first (median and range)", "tpot", "TPOT, ms"),
        ("ttft", "time to first token (median and range)", "ttft", "TTFT, ms"),
        ("throughput", "output tokens a second, all sequences", "", "tok/s"),
    ):
        written.append(directory / f"{name}.png")
        with chart(written[-1], 7, 4.2, xlabel="output length (tokens)", ylabel=label, title=title) as axes:
            for prompt, batch in sorted({(cell["prompt_length"], cell["batch_size"]) for cell in cells}):
                line = [c for c in cells if (c["prompt_length"], c["batch_size"]) == (prompt, batch)]
                x = [c["output_length"] for c in line]
                if key in SERIES:
                    times = [[1e3 * value for value in series(c["runs"])[key]] for c in line]
                    middle = list(map(statistics.median, times))
                    axes.fill_between(x, list(map(min, times)), list(map(max, times)), alpha=0.2)
                else:
                    middle = [rates(c)[1] for c in line]
                axes.plot(x, middle, "o-", label=f"prompt {prompt}, batch {batch}")
            axes.set_xscale("log", base=2)
            ticks = sorted({cell["output_length"] for cell in cells})
            axes.set_xticks(ticks, list(map(str, ticks)))
            axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8)
    return written


def write_reports(results: Json, directory: Path) -> list[Path]:
    """Write sweep.md and the plots into `directory`; returns what was written."""
    images, text = plots(results, directory), directory / "sweep.md"
    shown = "".join(f"\n![{path.stem}]({path.name})\n" for path in images)
    replace_file(text, markdown(results) + shown)
    return [text, *images]
