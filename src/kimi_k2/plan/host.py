"""What conversion and load ask of a host: memory, disk, and what the checkpoint's index says of its size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_k2.checkpoint.index import INDEX_NAME, stated_size
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CorruptHeaderError
from kimi_k2.files import is_there, read_json
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
        CorruptHeaderError: the index is no JSON object with a weight_map.
    """
    path = directory / INDEX_NAME
    if not is_there(path):
        return None
    raw = read_json(path)
    shards = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise CorruptHeaderError("expected an object 'weight_map' of file names", file=path)
    return {"total_size": stated_size(raw), "shards": len(set(shards.values())), "tensors": len(shards)}
