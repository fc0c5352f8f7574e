"""What a decode step costs against the length of the context: attention apart from the rest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.model.decoder import KimiK2ForCausalLM

LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


def measure(
    model: KimiK2ForCausalLM, lengths: tuple[int, ...] = LENGTHS, repeats: int = 30, batch: int = 1
) -> list[dict[str, float]]:
    """Median seconds of a decode step at each context length, split into attention over the cache and the rest.

    The cache holds random entries: the time does not depend on what is in it. Lengths take turns, so that a slow
    moment of the machine falls on all of them.

    Returns:
        Rows with `context`, `step`, `attention` (all layers' attention halves) and `rest`, in seconds.
    """
    cache = new_cache(model, batch, max(lengths))
    cache.data.normal_()
    decode, spent = DecodeStep(model, cache), 0.0

    def timed(half: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def call(*args: Any) -> tuple[Tensor, Tensor]:
            nonlocal spent
            began = time.perf_counter()
            made = half(*args)
            spent += time.perf_counter() - began
            return made

        return call

    for layer in decode.layers:
        layer.attention_half = timed(layer.attention_half)  # type: ignore[method-assign]
    samples: dict[int, list[tuple[float, float]]] = {length: [] for length in lengths}
    tokens = torch.ones(batch, dtype=torch.int64)
    for repeat in range(repeats + 3):
        for length in lengths:
            spent = 0.0
            start = time.perf_counter()
            decode(tokens, torch.full((batch,), length - 1))
            step = time.perf_counter() - start
            if repeat >= 3:
                samples[length].append((step, spent))
    return [
        {
            "context": length,
            "step": statistics.median(step for step, _ in taken),
            "attention": statistics.median(attention for _, attention in taken),
            "rest": statistics.median(step - attention for step, attention in taken),
        }
        for length, taken in samples.items()
    ]


def report(rows: list[dict[str, float]], plot: Path) -> None:
    """Print the table and the fitted lines, and write the plot (PNG)."""
    table = Table("context", "step, ms", "attention, ms", "rest, ms", title="decode step against context (measured)")
    for row in rows:
        values = [f"{row[key] * 1e3:.3f}" for key in ("step", "attention", "rest")]
        table.add_row(f"{row['context']:.0f}", *values)
    console = Console()
    console.print(table)
    for key in ("attention", "rest"):
        fitted = [row["context"] for row in rows], [row[key] for row in rows]
        slope, intercept = statistics.linear_regression(*fitted)
        r2 = statistics.correlation(*fitted) ** 2
        console.print(f"{key}: {intercept * 1e3:.3f} ms + {slope * 1e9:.2f} ns a cached token (R2 {r2:.4f})")

    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    x = [row["context"] for row in rows]
    for key, style in (("step", "k-o"), ("attention", "C0-s"), ("rest", "C1-^")):
        axes.plot(x, [row[key] * 1e3 for row in rows], style, label=key)
    axes.set(xlabel="context (tokens)", ylabel="ms a decode step", title="Decode step, absorbed MLA", ylim=(0, None))
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(plot, dpi=120)
    console.print(f"plot: {plot}")
