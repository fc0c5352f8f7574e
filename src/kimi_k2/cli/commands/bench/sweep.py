"""`kimi-k2 bench sweep`, the default of `kimi-k2 bench`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kimi_k2.cli.errors import resumable
from kimi_k2.cli.options import Count, Ranks, RunOptions, listed_numbers, with_groups
from kimi_k2.terminal import say


@dataclass(frozen=True)
class Cells:
    """What is timed.

    Attributes:
        output_lengths: Tokens to generate, comma-separated.
        prompt_lengths: Tokens of the prompt, comma-separated.
        batch_sizes: Sequences at once, comma-separated.
        runs: Timed runs of each cell.
    """

    output_lengths: str = "16,32,64,128,256,512"
    prompt_lengths: str = "128"
    batch_sizes: str = "1"
    runs: Count = 5

    def numbers(self, field: str) -> list[int]:
        """Of a list, ascending and each once."""
        return sorted(set(listed_numbers(getattr(self, field), f"--{field.replace('_', '-')}")))


@with_groups
def sweep(
    context: typer.Context,
    running: RunOptions,
    cells: Cells,
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or `tiny` for a synthetic one.")] = "tiny",
    out: Annotated[
        Path, typer.Option(help="Directory for sweep.json, sweep.md and its plots.", file_okay=False)
    ] = Path("bench"),
    ranks: Ranks = None,
) -> None:
    """Time prefill and decode over lengths and batch sizes; the same command continues an interrupted sweep."""
    from kimi_k2.api import KimiK2, compute_defaults
    from kimi_k2.bench.backend import Backend
    from kimi_k2.bench.errors import SweepError
    from kimi_k2.bench.render import markdown, write_reports
    from kimi_k2.bench.results import Settings
    from kimi_k2.bench.sweep import run_sweep
    from kimi_k2.sharding.manifest import made_layout
    from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
    from kimi_k2.synthetic.config import tiny_config

    lists = ("output_lengths", "prompt_lengths", "batch_sizes")
    numbers = {field: cells.numbers(field) for field in lists}
    settings = Settings.of(model=Path(model).name, backend=running.backend, runs=cells.runs, **numbers)
    longest = max(settings.prompt_lengths) + max(settings.output_lengths)
    options = running.opening(context, "dtype", length=longest, batch_size=settings.batch_sizes[0])
    details: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kimi-k2-bench-") as scratch:
        if model == "tiny":
            write_synthetic_checkpoint(Path(scratch), tiny_config())
        with KimiK2.open(scratch if model == "tiny" else model, ranks=ranks, **options) as session:
            if ranks is not None:
                layout = made_layout(ranks)
                details = {"weights": layout.experts, "moe_tp": layout.moe_tp, "moe_ep": layout.moe_ep}
            elif running.backend != "neuron":
                stored = compute_defaults(running.backend, running.dtype, running.keep_quantized)[1]
                details = {"weights": "stored" if stored else "float"}
            backend = Backend(session, running.backend, details)
            if session.rank > 0:
                backend.follow()
                return
            with resumable():
                results = run_sweep(settings, backend, out / "sweep.json", say=lambda line: say(line, err=True))
            backend.end()
    written = write_reports(results, out)
    say(markdown(results))
    say(f"wrote {', '.join(path.name for path in [out / 'sweep.json', *written])} to {out}")
    if failed := sum(cell["status"] != "ok" for cell in results["cells"]):
        raise SweepError(f"{failed} of {len(results['cells'])} cells failed; the same command tries them again")
