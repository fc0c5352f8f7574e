"""Rows of the comparison of routed experts: kept in a file of JSON lines, and summarized."""

from __future__ import annotations

import functools
import hashlib
import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kimi_k2.bench.kernels.harness import SLOWER
from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import KERNELS, source_hash
from kimi_k2.kernels.experts.tuning import FILES

Key = tuple[str, str, str, int]  # format, layout, routing, tokens
# Of a format: the libraries of its launches, the modules that choose among them, and the dtype of its tuning files.
SOURCES = {
    "FP8": (("experts/fp8", "experts/fp8_decode"), ("fp8.py", "fp8_decode.py"), "fp8_e4m3"),
    "INT4": (("experts/w4a16", "experts/w4a16_decode"), ("w4a16.py",), "int4"),
    "BF16": ((), ("bf16.py", "bf16_triton.py"), "none"),
}


@dataclass(frozen=True)
class Comparison:
    """A case's medians.

    Attributes:
        experts: distinct ones that a call reads, the mean over its routings.
        microseconds: by implementation, "ours" first.
        errors: by implementation, distance to float64 over the first tokens.
        bytes: of the weights of these experts.
        absent: by peer, why it was not timed.
        spread: by implementation, its slowest replay less its fastest, over the median.
        state: of the kernels, see `kernel_state`; empty where it was not noted.
    """

    format: str
    layout: str
    routing: str
    tokens: int
    experts: float
    bytes: float
    microseconds: dict[str, float]
    errors: dict[str, float]
    absent: dict[str, str]
    spread: dict[str, float] = field(default_factory=dict)
    state: str = ""

    @property
    def key(self) -> Key:
        """Of the case."""
        return self.format, self.layout, self.routing, self.tokens

    @property
    def ratio(self) -> float | None:
        """Our time over the best peer's; None without a peer."""
        others = [value for name, value in self.microseconds.items() if name != "ours"]
        return self.microseconds["ours"] / min(others) if others else None

    def line(self) -> str:
        """One line: ours, and each peer with our time over its time."""
        ours = self.microseconds["ours"]
        told = [f"ours {ours:.1f} us ({self.bytes / ours / 1e3:.0f} GB/s, error {self.errors['ours']:.1e})"]
        for name, value in self.microseconds.items():
            if name != "ours":
                told.append(f"{name} {value:.1f} us (error {self.errors[name]:.1e}), ratio {ours / value:.3f}")
        told += [f"{name} {reason}" for name, reason in self.absent.items()]
        head = f"{self.format} {self.layout} {self.routing} T={self.tokens}, {self.experts:.0f} experts"
        return f"{head}: {'; '.join(told)}"


@functools.cache
def kernel_state(name: str) -> str:
    """Eight digits that change with the sources and tuning files of a format's launches."""
    libraries, modules, dtype = SOURCES[name]
    digest = hashlib.sha256(" ".join(map(source_hash, libraries)).encode())
    for path in (
        *(KERNELS / "experts" / module for module in modules),
        *sorted(FILES.directory.glob(f"*,dtype={dtype},*")),
    ):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:8]


def read_rows(path: Path) -> dict[Key, Comparison]:
    """The cases of a file, of each the last row; none if there is no file.

    Raises:
        KernelError: a line is no row.
    """
    rows = {}
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            row = Comparison(**json.loads(line))
        except (json.JSONDecodeError, TypeError) as failure:
            raise KernelError(f"{path}, line {number}: {failure}, expected a row of the comparison") from failure
        rows[row.key] = row
    return rows


def add_row(path: Path, row: Comparison) -> None:
    """Append a row."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def _begun(path: Path) -> Path:
    return path.with_name(path.name + ".begun")


def begin_row(path: Path, key: Key) -> None:
    """Note that a case is being timed, as it may end the process."""
    with _begun(path).open("a") as file:
        file.write(json.dumps(key) + "\n")


def begun_rows(path: Path) -> set[Key]:
    """The cases that runs into this file have begun."""
    if not _begun(path).exists():
        return set()
    return {tuple(json.loads(line)) for line in _begun(path).read_text().splitlines()}


def ratios(rows: Iterable[Comparison]) -> list[tuple[float, Comparison]]:
    """Our time over the best peer's where there is one, smallest first."""
    return sorted(((one.ratio, one) for one in rows if one.ratio is not None), key=lambda pair: pair[0])


def summary(rows: Sequence[Comparison]) -> Iterator[str]:
    """Of each format and layout the cases, the median and largest ratio, where that is, and the states, in Markdown.

    Below them the cases whose ratio is above 1.05, largest first.
    """
    yield "| ours over the best peer's time | cases | median | largest | where | above 1.05 | kernels |"
    yield "|---|---|---|---|---|---|---|"
    for name in dict.fromkeys(one.format for one in rows):
        mine = [one for one in rows if one.format == name]
        layouts = dict.fromkeys(one.layout for one in mine)
        parts = [(f"{name} {layout}", [one for one in mine if one.layout == layout]) for layout in layouts]
        for title, part in [*parts, (f"{name}, all", mine)]:
            if not (timed := ratios(part)):
                continue
            values, (most, where) = [ratio for ratio, _ in timed], timed[-1]
            states = statistics.multimode(one.state or "not noted" for _, one in timed)
            others = len({one.state for _, one in timed}) - 1
            cells = (
                title,
                len(values),
                f"{statistics.median(values):.2f}",
                f"{most:.3f}",
                f"{where.routing}, {where.tokens:,} tokens" + f", {where.layout}" * (part is mine),
                sum(value > SLOWER for value in values) or "none",
                states[0] + (f" and {others} more" if others else ""),
            )
            yield f"| {' | '.join(map(str, cells))} |"
    yield from (f"  {one.line()}" for ratio, one in reversed(ratios(rows)) if ratio > SLOWER)
