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
from kimi_k2.sharding.attention_tiles import CORES, group_shapes, shapes
from kimi_k2.sharding.experts import PARTITIONS

from .config import KimiK2InferenceConfig
from .experts import CutWeights


def in_order_of_tiles(values: Tensor) -> Tensor:
    """Values along the last dimension in the order of a tile's rows: of each partition its value of every chunk."""
    return values.unflatten(-1, (-1, PARTITIONS)).mT.flatten(-2)


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

        def hold(name: str, *cuts: tuple[tuple[int, ...], int]) -> None:
            kinds = {"weight": dtype, "scale": torch.float32} if fp8 else {"weight": dtype}
            held = {
                suffix: Held(
                    tuple(size // (ranks if axis == dim else 1) for axis, size in enumerate(shape)), kind, (dim, 1)
                )
                for (suffix, kind), (shape, dim) in zip(kinds.items(), cuts, strict=False)
            }
            self.add_module(name, CutWeights(held, ranks))

        for name, cuts in shapes(config.hf, ranks).items():
            hold(name, *cuts)
        group = neuron.query_group
        for name, whole in group_shapes(config.hf, group).items() if group else ():
            hold(name, *(((CORES * ranks, *shape[1:]), 0) for shape in whole))

    def queries(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """q_b of float tiles: [B, S, q_lora_rank] to [B, h, S, 128] without position and [B, h, S, rope]."""
        q_b = self._held("q_b").flatten(0, 1)
        both = in_order_of_tiles(normed) @ q_b
        plain, rotary = both.split([self.heads * PARTITIONS, q_b.shape[1] - self.heads * PARTITIONS], dim=2)
        nope, rope = (states.unflatten(2, (self.heads, -1)).transpose(1, 2) for states in (plain, rotary))
        return nope, rope

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """W_UK and W_UV of float tiles, [h, 128, rank] both."""
        return self._held("w_uk").squeeze(2), self._held("w_uv").permute(0, 3, 2, 1).flatten(2)

    def output(self, values: Tensor, sequence_parallel: bool) -> Tensor:
        """o_proj of float tiles: [B, S, h * 128] to [B, S, H], summed over the ranks.

        With `sequence_parallel` a rank's part of the sequence.
        """
        o_proj = self._held("o").flatten(0, 1)
        by_row = values.unflatten(2, (self.heads, -1)).mT.flatten(2)
        group, partial_sum = parallel_state.get_tensor_model_parallel_group(), (by_row @ o_proj).to(self.reduce_dtype)
        out: Tensor
        if sequence_parallel:
            out = reduce_scatter_to_sequence_parallel_region(partial_sum, 1, process_group=group, dtype=values.dtype)
        else:
            out = reduce_from_tensor_model_parallel_region(partial_sum, process_group=group)
        return out.to(values.dtype)

    def arguments(self) -> dict[str, Tensor]:
        """All by the kernel's names."""
        tensors: dict[str, Tensor] = {}
        for name, tile in self.named_children():
            assert isinstance(tile, CutWeights)
            field = name.removeprefix("group_")  # in the place of a rank's own
            tensors["o_proj" if name == "o" else field] = tile.weight
            if tile.scale is not None:
                tensors[f"{field}_scales"] = tile.scale
        return tensors

    def _held(self, name: str) -> Tensor:
        tile = self.get_submodule(name)
        assert isinstance(tile, CutWeights)
        return tile.weight
