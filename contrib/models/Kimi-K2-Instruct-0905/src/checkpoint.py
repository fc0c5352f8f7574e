"""A checkpoint as the state dict of NeuronKimiK2Model; `kimi_k2.sharding` converts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import IGNORED
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.sharding.attention_tiles import CORES, OF_GROUP
from kimi_k2.sharding.experts.format import ExpertFormat
from kimi_k2.sharding.whole import load_whole_state_dict, whole_state_dict


def load_neuron_state_dict(directory: str | Path, neuron_config: Any, experts: ExpertFormat) -> dict[str, Tensor]:
    """Stream a checkpoint directory into an unsharded Neuron state dict.

    Raises:
        ConfigError, CheckpointError: see `KimiK2Config.from_pretrained` and `CheckpointReader`.
    """
    config = KimiK2Config.from_pretrained(directory)
    with CheckpointReader.for_config(directory, config) as reader:
        state = load_whole_state_dict(reader, config, neuron_config.torch_dtype, experts, **_layout(neuron_config))
        return _ranked(state, neuron_config.tp_degree)


def convert_state_dict(
    state_dict: dict[str, Any],
    config: KimiK2Config,
    neuron_config: Any,
    experts: ExpertFormat,
) -> dict[str, Tensor]:
    """The same from a state dict in memory; it is emptied on the way.

    Names are Hugging Face's, with or without the leading `model.`, which NxDI's loader takes off.

    Raises:
        MissingTensorError, UnexpectedTensorError: it is not the model's.
    """
    given = {
        name if name.startswith(("model.", "lm_head.")) else f"model.{name}": name
        for name in state_dict
        if not IGNORED.search(name)
    }
    read, dtype = lambda name: state_dict.pop(given[name]), neuron_config.torch_dtype
    state = whole_state_dict(config, dtype, experts, given, read, **_layout(neuron_config))
    return _ranked(state, neuron_config.tp_degree)


def _layout(neuron_config: Any) -> dict[str, Any]:
    decode, group = neuron_config.decode, neuron_config.query_group
    return {"decode": decode, "query_group": group, "ranks": neuron_config.tp_degree}


def _ranked(state: dict[str, Tensor], world_size: int) -> dict[str, Tensor]:
    """With the rank numbers that NxD cuts like a weight, and what groups of ranks share once for each rank."""
    numbers = torch.arange(world_size, dtype=torch.int32)
    for name, held in state.items():
        if name.split(".")[-2] in OF_GROUP:
            group = world_size * CORES // len(held)
            copies = held.unflatten(0, (-1, CORES)).view(torch.uint8 if held.dtype.itemsize == 1 else held.dtype)
            state[name] = copies.repeat_interleave(group, dim=0).flatten(0, 1).view(held.dtype)
    return {"rank_util.rank": numbers, **state}
