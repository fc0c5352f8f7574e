"""Per-rank weight files for `save_sharded_checkpoint`, streamed: NxD's own way holds the whole model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_k2.config import KimiK2Config
from kimi_k2.sharding.experts import format_held
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import MANIFEST, check_made_for
from kimi_k2.sharding.presharder import Presharder


def layout_of(neuron_config: Any) -> Layout:
    """The layout of the files that a neuron config loads."""
    quantization = neuron_config.quantization_type if neuron_config.quantized else None
    return Layout(
        neuron_config.moe_tp_degree,
        neuron_config.moe_ep_degree,
        experts=format_held(quantization, tiles=neuron_config.layers),
        dtype=neuron_config.torch_dtype,
        decode=neuron_config.decode,
        query_group=neuron_config.query_group,
    )


def preshard(model_path: str | Path, directory: str | Path, neuron_config: Any) -> None:
    """Write `directory/weights/tp{rank}_sharded_checkpoint.safetensors` for all ranks, or check those that lie there.

    Files that `kimi-k2 convert` wrote elsewhere are taken as they are; of the checkpoint only config.json is needed
    then. An interrupted run goes on where it stopped.

    Raises:
        ConfigError: the files there belong to another model or layout.
        CheckpointError: the checkpoint is damaged, or the disk is full.
    """
    config = KimiK2Config.from_pretrained(model_path)
    layout = layout_of(neuron_config)
    if (Path(directory) / MANIFEST).exists():
        check_made_for(directory, config, layout)
        return
    Presharder(model_path, directory, layout).run()
