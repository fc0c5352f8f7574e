"""A comparison as tables, a plot and JSON."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kimi_k2.parity.compare import Comparison, PointError
from kimi_k2.parity.logits import DIVERGENCE_TOLERANCE, TOLERANCE_MAP


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, for a file."""
    first = comparison.first
    return {
        "passed": comparison.passed,
        "first_divergence": asdict(first) if first else None,
        "logits": {**asdict(comparison.logits), "passed": comparison.logits.passed},
        "points": [asdict(point) for point in comparison.points],
    }


def _worst_by_layer(comparison: Comparison) -> dict[tuple[str, int | None], PointError]:
    groups: dict[tuple[str, int | None], list[PointError]] = defaultdict(list)
    for point in comparison.points:
        groups[point.phase, point.layer].append(point)
    return {key: max(points, key=lambda p: (not p.passed, p.relative_l2)) for key, points in groups.items()}


def describe(point: PointError) -> str:
    """Where a point is, in words."""
    where = "outside the layers" if point.layer is None else f"layer {point.layer}"
    return f"{point.phase}, {where}, {point.module} (relative L2 {point.relative_l2:.1e}, first at row {point.row})"


def print_report(comparison: Comparison, console: Console) -> None:
    """A row a layer, the logits by NxDI's rule, and the first module that diverges."""
    table = Table("phase", "layer", "worst point", "relative L2", "max difference", "")
    for (phase, layer), worst in _worst_by_layer(comparison).items():
        mark = "" if worst.passed else "[red]diverges[/red]"
        name = "-" if layer is None else str(layer)
        table.add_row(phase, name, worst.module, f"{worst.relative_l2:.1e}", f"{worst.max_difference:.1e}", mark)
    console.print(table)
    logits = Table("logits, top k", "atol, rtol", "largest difference / tolerated", title="NxDI's tolerance map")
    for k, (atol, rtol) in TOLERANCE_MAP.items():
        logits.add_row(str(k or "all"), f"{atol:g}, {rtol:g}", f"{comparison.logits.excess[str(k or 'all')]:.3f}")
    console.print(logits)
    steps = comparison.logits.divergences
    console.print(
        f"largest logit difference {comparison.logits.max_difference:.2e}; another token first at {len(steps)} steps"
        f" (difference {comparison.logits.divergence_difference:.1e}, tolerated {DIVERGENCE_TOLERANCE:g})",
        highlight=False,
    )
    if comparison.first is not None:
        console.print(f"first divergence: {describe(comparison.first)}", style="bold red", highlight=False)
    console.print("PASS" if comparison.passed else "FAIL", style="bold green" if comparison.passed else "bold red")


def plot(comparison: Comparison, path: Path) -> None:
    """Error of every point in order of computation (PNG)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 4), layout="constrained")
    for place, phase in enumerate(("prefill", "decode")):
        points = [point for point in comparison.points if point.phase == phase]
        values = [max(point.relative_l2, 1e-17) for point in points]
        axes.semilogy(range(len(points)), values, ".-", color=f"C{place}", label=phase, linewidth=0.7)
        off = [number for number, point in enumerate(points) if not point.passed]
        axes.semilogy(off, [values[number] for number in off], "rx")
    points = [point for point in comparison.points if point.phase == "prefill"]
    starts = [n for n, p in enumerate(points) if p.layer is not None and (n == 0 or points[n - 1].layer != p.layer)]
    step = max(1, len(starts) // 16)
    axes.set_xticks(starts[::step], [str(points[n].layer) for n in starts[::step]])
    axes.set(xlabel="layer", ylabel="relative L2", title="Error by point, in order of computation (x: diverges)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)
