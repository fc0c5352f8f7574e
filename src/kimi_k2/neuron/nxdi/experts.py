"""Experts in the tiles of the kernel of whole layers (`kimi_k2.sharding.experts`), for the hand-written class.

Prefill, and whatever else does not run the kernel, computes with the same tiles in PyTorch: gate and up contract the
hidden states in the order of the tiles' rows, so that no expert is held twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn import functional as F

from kimi_k2.contrib_model.moe import ExpertWeights, Held, KimiK2Experts, KimiK2MoE
from kimi_k2.sharding.convert import TILE_CUTS
from kimi_k2.sharding.experts import PARTITIONS

from .config import KimiK2InferenceConfig


class CutWeights(ExpertWeights):
    """Weights that all ranks divide; the cut is the dimension, and how many sections of it are cut one by one."""

    def mark(self, parameter: Any, cut: tuple[int, int], ranks: int) -> None:
        """Set NxD's attributes."""
        dim, stride = cut
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=stride, num_partitions=ranks)


class Tiles(nn.Module):
    """SwiGLU of tokens by a stack of experts in tiles."""

    gate_up_proj: ExpertWeights
    down_proj: ExpertWeights

    def hold(
        self, config: KimiK2InferenceConfig, count: int, width: int, dtype: torch.dtype, *, early: bool, shared: bool
    ) -> None:
        """Make the weights.

        Args:
            config: of the model.
            count: experts that this rank holds.
            width: this rank's columns of an expert.
            dtype: of the weights; FP8 ones have scales.
            early: whether the next layer's down projections are held folded with these experts' own (`early_qkv_a`).
            shared: whether it is the shared expert, a stack of one that all ranks divide.
        """
        neuron, hidden = config.neuron_config, config.hidden_size
        blocks = hidden // PARTITIONS
        shapes = {
            "gate_up_proj.weight": ((PARTITIONS, blocks, 2 * width), dtype),
            "down_proj.weight": ((width, hidden), dtype),
        }
        if dtype.itemsize == 1:
            scales = {
                "gate_up_proj.scale": ((2, blocks), torch.float32),
                "down_proj.scale": ((1, blocks), torch.float32),
            }
            shapes |= scales
        if early:
            shapes["early_qkv_a.weight"] = ((width, config.hf.qkv_a_dim), neuron.torch_dtype)
        for name in dict.fromkeys(full.partition(".")[0] for full in shapes):
            held = {
                full.rpartition(".")[2]: Held((count, *shape), kind, (dim + shared, sections))
                for full, (shape, kind) in shapes.items()
                if full.startswith(name)
                for dim, sections in [TILE_CUTS[full]]
            }
            self.add_module(name, (CutWeights if shared else ExpertWeights)(held, neuron.tp_degree))

    def mlp(self, x: Tensor, experts: Tensor | None = None) -> Tensor:
        """Tokens [E' or 1, T, H] through all local experts, or those of `experts` [E']: [E', T, H]."""
        dtype = x.dtype
        weight, scale = self.gate_up_proj.of_expert(experts)
        if scale is not None:
            # The blocks lie along the sum, so they are applied before it.
            factors = scale.mT.repeat_interleave(weight.shape[3] // 2, dim=2).unsqueeze(1)
            weight = weight.to(torch.float32) * factors
        blocks = weight.shape[2]
        in_order = x.unflatten(2, (blocks, PARTITIONS)).mT.flatten(2)
        gate, up = torch.einsum("eth,ehi->eti", in_order, weight.to(dtype).flatten(1, 2)).chunk(2, dim=2)
        weight, scale = self.down_proj.of_expert(experts)
        out = torch.einsum("eti,eih->eth", F.silu(gate) * up, weight.to(dtype))
        if scale is not None:
            # One row of blocks: their scales belong to the outputs.
            out = (out.unflatten(2, (blocks, PARTITIONS)).to(torch.float32) * scale.unsqueeze(3)).flatten(2).to(dtype)
        return out


class TiledExperts(Tiles, KimiK2Experts):
    """The hand-written routed experts, in tiles."""

    def __init__(self, config: KimiK2InferenceConfig, *, early: bool) -> None:
        self.early = early
        super().__init__(config)

    def make_weights(self, config: KimiK2InferenceConfig) -> None:
        """Tiles."""
        dtype = torch.float8_e4m3fn if config.neuron_config.quantized else config.neuron_config.torch_dtype
        width = config.moe_intermediate_size // self.tp
        self.hold(config, self.num_local_experts, width, dtype, early=self.early, shared=False)


class SharedTiles(Tiles):
    """The shared expert in tiles."""

    def __init__(self, config: KimiK2InferenceConfig, *, early: bool) -> None:
        super().__init__()
        assert config.shared_tiles is not None
        self.hold(config, 1, config.shared_width, config.shared_tiles, early=early, shared=True)

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] to the same, this rank's part of the sum."""
        return self.mlp(x.flatten(0, 1).unsqueeze(0)).view(x.shape)


class TiledMoE(KimiK2MoE):
    """The hand-written MoE with experts in tiles; arguments of `Tiles.hold`."""

    def __init__(self, config: KimiK2InferenceConfig, *, early: bool) -> None:
        self.early = early
        super().__init__(config, partial(TiledExperts, early=early))

    def make_shared(self, config: KimiK2InferenceConfig) -> nn.Module:
        """In tiles too."""
        return SharedTiles(config, early=self.early)
