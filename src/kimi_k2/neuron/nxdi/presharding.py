"""Per-rank weight files for `save_sharded_checkpoint`, streamed: NxD's own way holds the whole model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.sharding.experts.format import expert_formats, held_format
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import MANIFEST, check_made_for
from kimi_k2.sharding.presharder import Presharder


def layout_of(neuron_config: Any) -> Layout:
    """The layout of the files that a neuron config loads."""
    expert_parallel = neuron_config.moe_ep_degree > 1
    return Layout(
        neuron_config.moe_tp_degree if expert_parallel else neuron_config.tp_degree,
        neuron_config.moe_ep_degree,
        experts=held_format(neuron_config).name,
        dtype=neuron_config.torch_dtype,
        spmd_rank=expert_parallel or neuron_config.blockwise_matmul_config.parallelize_token_to_block_mapping,
        decode=neuron_config.decode,
        query_group=neuron_config.query_group,
    )


def preshard(model_path: str | Path, directory: str | Path, neuron_config: Any) -> None:
    """Write `directory/weights/tp{rank}_sharded_checkpoint.safetensors` for all ranks, or check those that lie there.

    Files that `kimi-k2 convert` wrote elsewhere are taken as they are; of the checkpoint only config.json is needed
    then. An interrupted run goes on where it stopped.

    Raises:
        ConfigError: the files there belong to another model or layout, or their scale blocks are not those asked for.
        CheckpointError: the checkpoint is damaged, or the disk is full.
    """
    config = KimiK2Config.from_pretrained(model_path)
    layout, options = layout_of(neuron_config), held_format(neuron_config).neuron_options()
    if options != (written := expert_formats()[layout.experts].for_layout(config, layout).neuron_options()):
        raise ConfigError(
            f"expected {written}, the options of the files, got {options}", field="quantization_block_size"
        )
    if (Path(directory) / MANIFEST).exists():
        check_made_for(directory, config, layout)
        return
    Presharder(model_path, directory, layout).run()
