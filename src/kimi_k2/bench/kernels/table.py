"""The kernel benchmark: every operation's rows, beside the ceilings measured in the same run."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

import kimi_k2.bench.kernels as bench
from kimi_k2.bench.kernels.harness import matmul_rate, read_bandwidth
from kimi_k2.bench.kernels.mla_drawn import drawn_rows
from kimi_k2.bench.kernels.row import Row
from kimi_k2.errors import KernelError


def operations() -> list[str]:
    """Modules beside this one that offer `rows()`."""
    names = [m.name for m in pkgutil.iter_modules(bench.__path__)]
    return [n for n in names if hasattr(importlib.import_module(f"{bench.__name__}.{n}"), "rows")]


def describe(row: Row, bandwidth: float, matrix_rate: float, ours: float | None = None) -> str:
    """One line of the table; `ours` is our time for a peer's case, told as a part of the peer's."""
    verdict = "" if ours is None else f"  ours {ours / row.microseconds:.3f} of it"
    if row.target is not None:
        verdict += f"  target {row.target:g}: {'met' if row.microseconds <= row.target else 'not met'}"
    rate = f"{row.teraflops:7.1f}" if row.flops else " " * 7
    return (
        f"{row.operation:<24} {row.case:<28} {row.implementation:<20} {row.microseconds:9.2f} us"
        f" {row.gigabytes_per_second:7.0f} GB/s {rate} TFLOP/s {row.share(bandwidth, matrix_rate):6.1%}{verdict}"
    )


def run(
    only: Sequence[str], peers: bool, out: Path | None, say: Callable[[str], None], *, drawn: int = 0, seed: int = 0
) -> None:
    """Say a line a row: microseconds, GB/s, TFLOP/s, the larger share of the two ceilings, and the target if any.

    A case's first row is ours; the others tell our time as a part of theirs.

    Args:
        only: operations to run; all if empty.
        peers: also time PyTorch and the peers that can be imported.
        out: JSON file to write; None for none.
        say: takes each line.
        drawn: so many drawn batches of MLA decode instead of the standard rows, the same for a seed.
        seed: of the drawn batches.

    Raises:
        KernelError: there is no CUDA device, or no such operation.
    """
    if not torch.cuda.is_available():
        raise KernelError("no CUDA device")
    available = operations()
    if unknown := sorted(set(only) - set(available)):
        raise KernelError(f"only: {', '.join(unknown)} not among {', '.join(available)}")
    bandwidth, matrix_rate = read_bandwidth(), matmul_rate()
    say(f"{torch.cuda.get_device_name()}: read {bandwidth:.0f} GB/s, BF16 GEMM {matrix_rate:.0f} TFLOP/s")
    found = []
    modules = (importlib.import_module(f"{bench.__name__}.{name}") for name in only or available)
    standard = (row for module in modules for row in module.rows(with_peers=peers))
    if peers and importlib.util.find_spec("vllm") is None:
        say("not installed: vLLM, so no row of FlashAttention 3, FlashMLA or DeepGEMM")
    ours: dict[tuple[str, str], float] = {}
    for row in drawn_rows(drawn, seed, peers) if drawn else standard:
        case = row.operation, row.case
        say(describe(row, bandwidth, matrix_rate, ours.get(case)))
        ours.setdefault(case, row.microseconds)  # a case's first row
        found.append(asdict(row))
    if out is not None:
        ceilings = {"device": torch.cuda.get_device_name(), "read_gb_s": bandwidth, "bf16_tflop_s": matrix_rate}
        out.write_text(json.dumps(ceilings | {"rows": found}, indent=1) + "\n")
