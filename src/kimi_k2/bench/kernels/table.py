"""The kernel benchmark: every operation's cases."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from kimi_k2.bench.kernels import gate, linear, mla, mla_prefill, router, vision
from kimi_k2.bench.kernels.harness import Case
from kimi_k2.bench.kernels.report import Report
from kimi_k2.errors import KernelError

# By operation its cases, with peers or without.
OPERATIONS: dict[str, Callable[[bool], Iterator[Case]]] = {
    "gate": gate.cases,
    "linear": linear.cases,
    "mla": mla.cases,
    "mla_prefill": mla_prefill.cases,
    "router": router.cases,
    "vision": vision.cases,
}
# Replays whose median is a row's time: of standard cases, and of drawn ones, which are many.
REPLAYS, DRAWN_REPLAYS = 25, 9


def run(
    only: Sequence[str], peers: bool, out: Path | None, say: Callable[[str], None], *, drawn: int = 0, seed: int = 0
) -> None:
    """Say a line a row: microseconds, GB/s, TFLOP/s, and the larger share of the two ceilings.

    Args:
        only: operations to run; all if empty.
        peers: also time PyTorch and the peers that can be imported.
        out, say: see `Report`.
        drawn: so many drawn batches of MLA decode instead of the standard rows, the same for a seed.
        seed: of the drawn batches.

    Raises:
        KernelError: there is no CUDA device, or no such operation.
    """
    if unknown := sorted(set(only) - set(OPERATIONS)):
        raise KernelError(f"only: {', '.join(unknown)} not among {', '.join(OPERATIONS)}")
    report = Report(out, say)
    standard = chain.from_iterable(OPERATIONS[name](peers) for name in only or OPERATIONS)
    if peers and importlib.util.find_spec("vllm") is None:
        say("not installed: vLLM, so no row of FlashAttention 3, FlashMLA or DeepGEMM")
    for case in mla.cases(peers, mla.drawn(drawn, seed)) if drawn else standard:
        if report.is_left(case.operation, case.name):
            report.begin(case.operation, case.name)
            report.time(case, DRAWN_REPLAYS if drawn else REPLAYS)
    report.end()
