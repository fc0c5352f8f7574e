"""Results of `vllm bench serve --save-result` as one table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kimi_k2.bench.errors import SweepError
from kimi_k2.bench.render import markdown_table
from kimi_k2.files import read_json

METRICS = ("ttft", "tpot", "itl", "e2el")
HEADER = [
    "model", "concurrency", "input", "output", *(f"{name.upper()}, ms" for name in METRICS), "requests/s",
    "output tok/s", "total tok/s",
]  # fmt: skip


def markdown(files: Sequence[Path]) -> str:
    """A row a file: mean, median and P99 of each time, tokens of a request, throughput.

    Raises:
        SweepError: a file is no such result, or requests of it failed.
    """
    rows = sorted((_row(file) for file in files), key=lambda row: (row[0], int(row[1] or 0), float(row[2])))
    return f"Of each time: mean, median, P99.\n\n{markdown_table(HEADER, rows)}"


def _row(file: Path) -> list[str]:
    result = read_json(file, SweepError)
    try:
        done, asked = int(result["completed"]), int(result["num_prompts"])
        if done != asked:
            raise SweepError(f"{asked - done} of {asked} requests failed", file=file)
        tokens = [f"{result[f'total_{kind}_tokens'] / done:.1f}" for kind in ("input", "output")]
        rates = [
            f"{result[name]:.2f}" for name in ("request_throughput", "output_throughput", "total_token_throughput")
        ]
        concurrency = "" if result["max_concurrency"] is None else str(result["max_concurrency"])
        return [str(result["model_id"]), concurrency, *tokens, *(_three(result, name) for name in METRICS), *rates]
    except KeyError as error:
        raise SweepError(f"no result of `vllm bench serve --save-result`: no field {error}", file=file) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise SweepError(f"no result of `vllm bench serve --save-result`: {error}", file=file) from None


def _three(result: dict[str, Any], metric: str) -> str:
    """Empty where `--percentile-metrics` left the metric out."""
    values = [result.get(f"{kind}_{metric}_ms") for kind in ("mean", "median", "p99")]
    return "" if None in values else ", ".join(f"{value:.2f}" for value in values)
