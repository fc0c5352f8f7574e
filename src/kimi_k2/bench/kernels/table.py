"""The kernel benchmark: every operation's rows, beside the ceilings measured in the same run."""

from __future__ import annotations

import importlib.util
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import torch

from kimi_k2.bench.kernels import experts, gate, linear, mla, mla_prefill, router
from kimi_k2.bench.kernels.harness import SLOWER, Case, Row, matmul_rate, quick_captures, read_bandwidth
from kimi_k2.errors import KernelError
from kimi_k2.files import replace_file

# By operation its cases, with peers or without.
OPERATIONS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "gate": gate.cases,
    "linear": linear.cases,
    "mla": mla.cases,
    "mla_prefill": mla_prefill.cases,
    "moe": experts.fp8_cases,
    "router": router.cases,
    "w4a16": experts.four_bit_cases,
}
# Replays whose median is a row's time: of standard cases, and of drawn ones, which are many.
REPLAYS, DRAWN_REPLAYS = 25, 9


def describe(row: Row, bandwidth: float, matrix_rate: float, ours: float | None = None) -> str:
    """One line of the table; `ours` is our time for a peer's case, told as a part of the peer's."""
    verdict = "" if ours is None else f"  ours {ours / row.microseconds:.3f} of it"
    rate = f"{row.teraflops:7.1f}" if row.flops else " " * 7
    return (
        f"{row.operation:<24} {row.case:<28} {row.implementation:<20} {row.microseconds:9.2f} us"
        f" {row.gigabytes_per_second:7.0f} GB/s {rate} TFLOP/s {row.share(bandwidth, matrix_rate):6.1%}{verdict}"
    )


def run(
    only: Sequence[str], peers: bool, out: Path | None, say: Callable[[str], None], *, drawn: int = 0, seed: int = 0
) -> None:
    """Say a line a row: microseconds, GB/s, TFLOP/s, and the larger share of the two ceilings.

    A case's first row is ours; the others tell our time as a part of theirs.

    Args:
        only: operations to run; all if empty.
        peers: also time PyTorch and the peers that can be imported.
        out: JSON file, written anew at each case; None for none.
        say: takes each line.
        drawn: so many drawn batches of MLA decode instead of the standard rows, the same for a seed.
        seed: of the drawn batches.

    Raises:
        KernelError: there is no CUDA device, or no such operation.
    """
    if not torch.cuda.is_available():
        raise KernelError("no CUDA device")
    if unknown := sorted(set(only) - set(OPERATIONS)):
        raise KernelError(f"only: {', '.join(unknown)} not among {', '.join(OPERATIONS)}")
    quick_captures()
    bandwidth, matrix_rate = read_bandwidth(), matmul_rate()
    ceilings = {"device": torch.cuda.get_device_name(), "read_gb_s": bandwidth, "bf16_tflop_s": matrix_rate}
    say(f"{torch.cuda.get_device_name()}: read {bandwidth:.0f} GB/s, BF16 GEMM {matrix_rate:.0f} TFLOP/s")
    rows: list[Row] = []
    standard = chain.from_iterable(OPERATIONS[name](peers) for name in only or OPERATIONS)
    if peers and importlib.util.find_spec("vllm") is None:
        say("not installed: vLLM, so no row of FlashAttention 3, FlashMLA or DeepGEMM")
    for case in mla.cases(peers, mla.drawn(drawn, seed)) if drawn else standard:
        ours: float | None = None
        for row in case.rows(DRAWN_REPLAYS if drawn else REPLAYS):
            say(describe(row, bandwidth, matrix_rate, ours))
            ours = ours or row.microseconds
            rows.append(row)
        if out is not None:
            replace_file(out, json.dumps(ceilings | {"rows": [asdict(one) for one in rows]}, indent=1) + "\n")
    for line in slower(rows):
        say(line)


def slower(rows: Sequence[Row]) -> Iterator[str]:
    """Of each operation and form of ours a line over its cases that have a peer, then those above SLOWER."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if not row.implementation.startswith("ours"):
            case = row.operation, row.case
            best[case] = min(best.get(case, math.inf), row.microseconds)
    shares: dict[tuple[str, str], list[tuple[float, str]]] = {}
    for row in rows:
        case = row.operation, row.case
        if row.implementation.startswith("ours") and case in best:
            share = row.microseconds / best[case]
            shares.setdefault((row.operation, row.implementation), []).append((share, row.case))
    for (operation, who), told in shares.items():
        told.sort(reverse=True)
        above = [f"  {share:.3f} {case}" for share, case in told if share > SLOWER]
        middle = statistics.median(share for share, _ in told)
        largest = f"largest {told[0][0]:.3f}, above {SLOWER} in {len(above)}"
        yield f"{operation}, {who}: {len(told)} cases beside peers, of the best's time median {middle:.3f}, {largest}"
        yield from above
