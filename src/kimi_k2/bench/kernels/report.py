"""The rows of a kernel benchmark, beside the ceilings measured in the same run."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from kimi_k2.bench.kernels.harness import SLOWER, Case, Row, matmul_rate, quick_captures, read_bandwidth
from kimi_k2.errors import KernelError
from kimi_k2.files import replace_file
from kimi_k2.kernels.common.build import KERNELS


def describe(row: Row, bandwidth: float, matrix_rate: float, ours: float | None = None) -> str:
    """One line of the table; `ours` is our time for a peer's case, told as a part of the peer's."""
    verdict = "" if ours is None else f"  ours {ours / row.microseconds:.3f} of it"
    rate = f"{row.teraflops:7.1f}" if row.flops else " " * 7
    return (
        f"{row.operation:<24} {row.case:<28} {row.implementation:<20} {row.microseconds:9.2f} us"
        f" {row.gigabytes_per_second:7.0f} GB/s {rate} TFLOP/s {row.share(bandwidth, matrix_rate):6.1%}{verdict}"
    )


def kernels() -> str:
    """Eight digits that change with the sources and tuning files of all kernels."""
    digest = hashlib.sha256()
    for path in sorted(one for one in KERNELS.rglob("*.*") if one.suffix in (".py", ".cu", ".cuh", ".json")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:8]


class Report:
    """The rows of a run.

    Args:
        out: JSON file, written anew at each case; None for none. Of one that is there, of the same card and kernels,
            the rows are kept. A case that the run before began and did not end is named and left out: it may have ended
            that run.
        say: takes each line.

    Raises:
        KernelError: there is no CUDA device.
    """

    def __init__(self, out: Path | None, say: Callable[[str], None]) -> None:
        if not torch.cuda.is_available():
            raise KernelError("no CUDA device")
        quick_captures()
        self.out, self.say, self.rows, self.begun = out, say, list[Row](), list[list[str]]()
        self.bandwidth, self.matrix_rate = read_bandwidth(), matmul_rate()
        self.made = {"device": torch.cuda.get_device_name(), "kernels": kernels()}
        say(f"{self.made['device']}: read {self.bandwidth:.0f} GB/s, BF16 GEMM {self.matrix_rate:.0f} TFLOP/s")
        there = json.loads(out.read_text()) if out is not None and out.exists() else {}
        if self.made.items() <= there.items():
            self.rows, self.begun = [Row(**row) for row in there["rows"]], there["begun"]
            ended = [[row.operation, row.case] for row in self.rows]
            for case in self.begun:
                if case not in ended:
                    say(f"left out, as a run ended in it: {', '.join(case)}")

    def is_left(self, operation: str, case: str) -> bool:
        """Whether no run into this file has begun the case."""
        return [operation, case] not in self.begun

    def begin(self, operation: str, case: str) -> None:
        """Note that a case is being timed, as it may end the process."""
        self.begun.append([operation, case])
        self._write()

    def time(self, case: Case, replays: int = 25) -> None:
        """Say a line a row; the first one is ours, the others tell our time as a part of theirs."""
        ours: float | None = None
        for row in case.rows(replays, self.say):
            self.say(describe(row, self.bandwidth, self.matrix_rate, ours))
            ours = ours or row.microseconds
            self.rows.append(row)
        self._write()

    def _write(self) -> None:
        if self.out is not None:
            ceilings = {"read_gb_s": self.bandwidth, "bf16_tflop_s": self.matrix_rate, "begun": self.begun}
            content = self.made | ceilings | {"rows": [asdict(row) for row in self.rows]}
            replace_file(self.out, json.dumps(content, indent=1) + "\n")

    def end(self) -> None:
        """Say where a peer is faster."""
        for line in slower(self.rows):
            self.say(line)


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
        largest = f"largest {told[0][0]:.3f} ({told[0][1]}), above {SLOWER} in {len(above)}"
        yield f"{operation}, {who}: {len(told)} cases beside peers, of the best's time median {middle:.3f}, {largest}"
        yield from above
