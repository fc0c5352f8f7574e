"""A checkpoint as the state dict of NeuronKimiK2Model; `kimi_k2.sharding` converts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kimi_k2.checkpoint.names import IGNORED
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError
from kimi_k2.sharding.attention_tiles import CORES, OF_GROUP
from kimi_k2.sharding.experts.format import ExpertFormat
from kimi_k2.sharding.manifest import WEIGHTS, rank_file_name
from kimi_k2.sharding.whole import load_whole_state_dict, whole_state_dict
from kimi_k2.spellings import plain_name

_LOG = logging.getLogger(__name__)
_BIAS = ".mlp.router.e_score_correction_bias"


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
    plain_names = {name: plain_name(name) for name in state_dict}
    stored_names = {
        plain if plain.startswith(("model.", "lm_head.")) else f"model.{plain}": name
        for name, plain in plain_names.items()
        if not IGNORED.search(plain)
    }
    read, dtype = lambda name: state_dict.pop(stored_names[name]), neuron_config.torch_dtype
    state = whole_state_dict(config, dtype, experts, stored_names, read, **_layout(neuron_config))
    return _ranked(state, neuron_config.tp_degree)


def check_router_bias(loaded: Any, source: str | Path, compiled: str | Path | None, first: int) -> None:
    """Read the routers' biases back from the device and compare them with the file, bit for bit.

    A transformation of layouts may round or drop one, which changes nearly every choice, and no error says so.

    Args:
        loaded: NxD's model behind `initialize`, whose `weights` are a rank's tensors by name.
        source: the checkpoint's directory.
        compiled: the directory of pre-sharded files, where they were loaded; else None.
        first: number of the first rank here.

    Raises:
        CheckpointError: a bias on the device is not float32, or not what the file holds.
    """
    weights = getattr(loaded, "weights", None)
    if not weights:
        _LOG.warning("the routers' biases cannot be read back from the device: NxD's model has no weights")
        return
    tensors = {name.replace("->", ".").removeprefix("target_model."): tensor for name, tensor in weights[0].items()}
    for name, stored in _stored_biases(source, compiled, first):
        bias = tensors[name].cpu() if name in tensors else None
        if bias is None or bias.dtype != torch.float32 or not torch.equal(bias, stored):
            where = compiled or source
            raise CheckpointError("on the device it is not float32 with the file's bits", file=where, tensor=name)


def _stored_biases(source: str | Path, compiled: str | Path | None, first: int) -> Iterator[tuple[str, Tensor]]:
    if compiled is not None:
        with safe_open(Path(compiled) / WEIGHTS / rank_file_name(first), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if name.endswith(_BIAS):
                    yield name, file.get_tensor(name)
        return
    config = KimiK2Config.from_pretrained(source)
    with CheckpointReader.for_config(source, config) as reader:
        for layer in filter(config.is_moe_layer, range(config.num_hidden_layers)):
            stored = reader.get(f"model.layers.{layer}.mlp.gate.e_score_correction_bias").to(torch.float32)
            yield f"layers.{layer}{_BIAS}", stored


def _layout(neuron_config: Any) -> dict[str, Any]:
    decode, group = neuron_config.decode, neuron_config.query_group
    return {"decode": decode, "query_group": group, "ranks": neuron_config.tp_degree}


def _ranked(state: dict[str, Tensor], world_size: int) -> dict[str, Tensor]:
    """With the rank numbers that NxD cuts like a weight, and what groups of ranks share once for each rank."""
    numbers = torch.arange(world_size, dtype=torch.int32)
    for name, tensor in state.items():
        if name.split(".")[-2] in OF_GROUP:
            group = world_size * CORES // len(tensor)
            copies = tensor.unflatten(0, (-1, CORES)).view(torch.uint8 if tensor.dtype.itemsize == 1 else tensor.dtype)
            state[name] = copies.repeat_interleave(group, dim=0).flatten(0, 1).view(tensor.dtype)
    return {"rank_util.rank": numbers, **state}
