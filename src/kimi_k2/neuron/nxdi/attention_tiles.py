"""A MoE layer's attention weights in tiles (`kimi_k2.sharding.attention_tiles`), for the kernel of whole layers.

Prefill computes with the same tiles where they are float, in the order of their rows; beside FP8 tiles it has the
ordinary weights.
"""

from __future__ import annotations

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from kimi_k2.contrib_model.moe import Held
from kimi_k2.sharding.attention_tiles import CORES, output, queries, shapes, up_projections

from .config import KimiK2InferenceConfig
from .experts import CutWeights


class AttentionTiles(nn.Module):
    """This rank's tiles, each with `weight` and, in FP8, `scale`: q_b, w_uk, w_uv and o.

    A layer whose cache a group of ranks shares has OF_GROUP too.
    """

    def __init__(self, config: KimiK2InferenceConfig) -> None:
        super().__init__()
        neuron = config.neuron_config
        ranks, fp8 = neuron.tp_degree, config.layout.attention_tiles(config.hf) == "fp8"
        self.heads, self.reduce_dtype = config.hf.num_attention_heads // ranks, neuron.rpl_reduce_dtype
        self.reduce_dtype = self.reduce_dtype or neuron.torch_dtype
        dtype = torch.float8_e4m3fn if fp8 else neuron.torch_dtype

        kinds = {"weight": dtype, "scale": torch.float32} if fp8 else {"weight": dtype}
        for name, cuts in shapes(config.hf, ranks, neuron.query_group).items():
            held = {}
            for (suffix, kind), (shape, dim) in zip(kinds.items(), cuts, strict=False):
                if dim is None:  # the group's, on each of its ranks
                    shape, dim = (CORES * ranks, *shape[1:]), 0
                local = tuple(size // (ranks if axis == dim else 1) for axis, size in enumerate(shape))
                held[suffix] = Held(local, kind, (dim, 1))
            self.add_module(name, CutWeights(held, ranks))

    def queries(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """q_b of float tiles: [B, S, q_lora_rank] to [B, h, S, 128] without position and [B, h, S, rope]."""
        nope, rope = (query.transpose(1, 2) for query in queries(normed, self._held("q_b"), self.heads))
        return nope, rope

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """W_UK and W_UV of float tiles, [h, 128, rank] both."""
        return up_projections(self._held("w_uk"), self._held("w_uv"))

    def output(self, values: Tensor, sequence_parallel: bool) -> Tensor:
        """o_proj of float tiles: [B, S, h * 128] to [B, S, H], summed over the ranks.

        With `sequence_parallel` a rank's part of the sequence.
        """
        group = parallel_state.get_tensor_model_parallel_group()
        partial_sum = output(values, self._held("o")).to(self.reduce_dtype)
        out: Tensor
        if sequence_parallel:
            out = reduce_scatter_to_sequence_parallel_region(partial_sum, 1, process_group=group, dtype=values.dtype)
        else:
            out = reduce_from_tensor_model_parallel_region(partial_sum, process_group=group)
        return out.to(values.dtype)

    def _held(self, name: str) -> Tensor:
        tile = self.get_submodule(name)
        assert isinstance(tile, CutWeights)
        return tile.weight
