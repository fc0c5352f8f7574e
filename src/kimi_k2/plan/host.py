"""What conversion and load ask of a host: memory, disk, and what the checkpoint's index says of its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_k2.checkpoint.index import INDEX_NAME, CheckpointIndex
from kimi_k2.config import KimiK2Config
from kimi_k2.files import is_there
from kimi_k2.plan.target import Target
from kimi_k2.sharding.dry_run import dry_run


def host_plan(config: KimiK2Config, target: Target) -> dict[str, int]:
    """Bytes read, written and held by conversion and load.

    `load_peak_memory_bound` is what all ranks' tensors take: NxDI keeps them until they are on the devices
    (application_base.py, `load_weights`), and one process a GPU keeps its own rank's.

    Raises:
        ConfigError: a size does not divide among the ranks.
    """
    sizes = dry_run(config, target.layout)
    return {
        "convert_reads": sizes.input_bytes,
        "convert_writes": sizes.output_bytes,
        "convert_disk": sizes.input_bytes + sizes.output_bytes,
        "convert_peak_memory_estimate": sizes.peak_memory,
        "load_reads": sizes.output_bytes,
        "load_peak_memory_bound": sizes.output_bytes,
    }


def read_index(directory: Path) -> dict[str, Any] | None:
    """Size and number of shards as the index states them; the shards need not be there. None without an index.

    Raises:
        CorruptHeaderError: see `CheckpointIndex.read`.
    """
    if not is_there(directory / INDEX_NAME):
        return None
    index = CheckpointIndex.read(directory)
    assert index.weight_map is not None
    return {"total_size": index.total_size, "shards": len(index.shards), "tensors": len(index.weight_map)}
