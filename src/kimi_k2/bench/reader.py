"""Reading speed and memory of CheckpointReader beside a plain safetensors loop over the same files."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from safetensors import safe_open
from torch import Tensor

from kimi_k2.bench.backend import peak_resident
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config

Consumer = Callable[[Tensor], object]

# "drop" touches nothing, so it measures the reader alone; "copy" moves every byte, as any real use does.
CONSUMERS: dict[str, Consumer] = {"drop": lambda tensor: None, "copy": lambda tensor: tensor.clone()}


def read_ours(directory: Path, consume: Consumer) -> int:
    """Stream the checkpoint through CheckpointReader, headers validated; returns the bytes delivered."""
    total = 0
    with CheckpointReader.for_config(directory, KimiK2Config.from_pretrained(directory)) as reader:
        for _, tensor in reader.stream():
            consume(tensor)
            total += tensor.nbytes
    return total


def read_plain(directory: Path, consume: Consumer) -> int:
    """The loop that everybody writes: `safe_open` a shard, `get_tensor` each key."""
    total = 0
    for shard in sorted(directory.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                tensor = file.get_tensor(key)
                consume(tensor)
                total += tensor.nbytes
    return total


READERS = {"CheckpointReader": read_ours, "safe_open loop": read_plain}


def _warm(directory: Path) -> None:
    for shard in directory.glob("*.safetensors"):
        with shard.open("rb", buffering=0) as file:
            while file.read(2**24):
                pass


def _peak_rss_above_start(directory: Path, reader: str, consumer: str) -> int:
    """Bytes of peak resident memory that reading adds to an interpreter with torch loaded, in a fresh process."""
    command = [sys.executable, "-m", "kimi_k2.bench.reader", str(directory), reader, consumer]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def measure(directory: Path, repeats: int = 5) -> list[dict[str, Any]]:
    """Each reader with each consumer: speed in this process, taking turns on a warmed cache; memory in fresh ones.

    Returns:
        Rows with reader, consumer, seconds and GB/s (median), and peak resident memory above the start.
    """
    torch.set_num_threads(1)
    taken: dict[tuple[str, str], list[float]] = {}
    total = 0
    for repeat in range(repeats):
        for consumer, consume in CONSUMERS.items():
            # A kernel may reclaim cached pages between runs, and whoever goes first may pay for it.
            for reader in list(READERS)[:: 1 if repeat % 2 else -1]:
                _warm(directory)
                start = time.perf_counter()
                total = READERS[reader](directory, consume)
                taken.setdefault((reader, consumer), []).append(time.perf_counter() - start)
    return [
        {
            "reader": reader,
            "consumer": consumer,
            "gigabytes": total / 1e9,
            "seconds": statistics.median(seconds),
            "gb_per_s": total / 1e9 / statistics.median(seconds),
            "rss_above_start_mib": _peak_rss_above_start(directory, reader, consumer) / 2**20,
        }
        for (reader, consumer), seconds in taken.items()
    ]


def report(rows: list[dict[str, Any]]) -> None:
    """Print the rows, and ours over the plain loop for each consumer."""
    table = Table("reader", "consumer", "GB", "s", "GB/s", "peak RSS above start, MiB", "ours / plain")
    speed = {(row["reader"], row["consumer"]): row["gb_per_s"] for row in rows}
    for row in rows:
        ratio = speed["CheckpointReader", row["consumer"]] / speed["safe_open loop", row["consumer"]]
        table.add_row(
            row["reader"], row["consumer"], f"{row['gigabytes']:.2f}", f"{row['seconds']:.3f}",
            f"{row['gb_per_s']:.2f}", f"{row['rss_above_start_mib']:.0f}", f"{ratio:.2f}",
        )  # fmt: skip
    Console().print(table)


def _main(directory: str, reader: str, consumer: str) -> None:
    before = peak_resident() or 0
    READERS[reader](Path(directory), CONSUMERS[consumer])
    typer.echo((peak_resident() or 0) - before)


if __name__ == "__main__":
    _main(*sys.argv[1:])
