"""The plain model over what the ranks' files hold of the experts in tiles, dequantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import plain_model

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.sharding.convert import NeuronMapping
from kimi_k2.sharding.layout import Layout


def untiled(state: dict[str, torch.Tensor], name: str, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate beside up [E, 2 I, H], and down [E, H, I], float32, of whole tiles with scales for `parts` ranks."""

    def scales(projection: str) -> torch.Tensor:
        scale = state.get(f"{name}.{projection}.scale")
        return torch.ones(1) if scale is None else scale

    tiles = state[f"{name}.gate_up_proj.weight"].float().unflatten(3, (2, parts, -1))  # [E, 128, H/128, 2, parts, I]
    scale = scales("gate_up_proj")
    if scale.dim() > 1:  # [E, 2 * parts, H/128]
        tiles = tiles * scale.unflatten(1, (2, parts)).permute(0, 3, 1, 2)[:, None, ..., None]
    gate_up = tiles.permute(0, 3, 4, 5, 2, 1).flatten(4, 5).flatten(1, 3)
    down, scale = state[f"{name}.down_proj.weight"].float(), scales("down_proj")  # [E, I, H], [E, parts, H/128]
    if scale.dim() > 1:
        down = down * scale.repeat_interleave(down.shape[1] // scale.shape[1], 1).repeat_interleave(128, 2)
    return gate_up, down.mT


def whole_state(
    directory: Path, experts: Any, dtype: torch.dtype, ranks: tuple[int, int] = (1, 1), decode: Any = "xla"
) -> dict[str, torch.Tensor]:
    """What all ranks hold together, uncut: experts [E, input, output], or as their tiles have them.

    Args:
        directory: of the checkpoint.
        experts: their format.
        dtype: of the model.
        ranks: that share an expert, and groups of them.
        decode: form of a decode step.
    """
    config = KimiK2Config.from_pretrained(directory)
    layout = Layout(*ranks, experts=experts.name, dtype=dtype, decode=decode)
    with CheckpointReader.for_config(directory, config) as reader:
        mapping = NeuronMapping(config, layout, reader.names(), reader.get, experts=experts)
        mapping.of_experts = (1, 1)
        return mapping.state_dict()


def plain_over_stored(directory: Path, config: Any, experts: Any) -> Any:
    """The plain model in float32 with routed and shared experts as the neuron config of `config` has them stored.

    Args:
        directory: of the checkpoint.
        config: a KimiK2NeuronConfig with tiles.
        experts: their format.
    """
    model = plain_model(directory)
    ranks = config.moe_tp_degree, config.moe_ep_degree
    state = whole_state(directory, experts, config.torch_dtype, ranks, config.decode)
    blocks: Any = model.model.layers
    for layer, block in enumerate(blocks):
        if not hasattr(block.mlp, "experts"):
            continue
        root = f"layers.{layer}.mlp"
        gate_up, down = untiled(state, f"{root}.experts", config.moe_tp_degree)
        block.mlp.experts.gate_up_proj.copy_(gate_up)
        block.mlp.experts.down_proj.copy_(down)
        if experts.shared is None:
            continue
        gate_up, down = untiled(state, f"{root}.shared_experts", config.tp_degree)
        gate, up = gate_up[0].chunk(2)
        held = block.mlp.shared_experts
        for linear, weight in ((held.gate_proj, gate), (held.up_proj, up), (held.down_proj, down[0])):
            linear.weight.copy_(weight)
    return model
