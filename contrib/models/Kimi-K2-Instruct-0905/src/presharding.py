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


def layout_of(neuron_config: Any, config: KimiK2Config) -> Layout:
    """The layout of the files that a neuron config loads.

    Raises:
        ConfigError: the scale blocks are not the ones that the files have.
    """
    held = held_format(neuron_config)
    expert_parallel = neuron_config.moe_ep_degree > 1
    layout = Layout(
        neuron_config.moe_tp_degree if expert_parallel else neuron_config.tp_degree,
        neuron_config.moe_ep_degree,
        experts=held.name,
        dtype=neuron_config.torch_dtype,
        spmd_rank=expert_parallel or neuron_config.blockwise_matmul_config.parallelize_token_to_block_mapping,
        early_router=neuron_config.early_router,
        early_qkv_a=neuron_config.early_qkv_a,
        attention_tiles=neuron_config.attention_tiles,
        query_group=neuron_config.query_group,
    )
    if held != (written := expert_formats()[held.name].for_layout(config, layout)):
        raise ConfigError(
            f"expected {written.neuron_options()}, the options of the files, got {held.neuron_options()}",
            field="quantization_block_size",
        )
    return layout


def preshard(model_path: str | Path, directory: str | Path, neuron_config: Any) -> None:
    """Write `directory/weights/tp{rank}_sharded_checkpoint.safetensors` for all ranks, or check those that lie there.

    Files that `kimi-k2 convert` wrote elsewhere are taken as they are; of the checkpoint only config.json is needed
    then. An interrupted run goes on where it stopped.

    Raises:
        ConfigError: the files there belong to another model or layout.
        CheckpointError: the checkpoint is damaged, or the disk is full.
    """
    config = KimiK2Config.from_pretrained(model_path)
    layout = layout_of(neuron_config, config)
    if (Path(directory) / MANIFEST).exists():
        check_made_for(directory, config, layout)
        return
    Presharder(model_path, directory, layout).run()
