"""A decode step's attention as one NKI kernel on weights in tiles (`kimi_k2.sharding.attention_tiles`).

The kernel takes the down projections and gives this rank's part of o_proj's output, which is summed here, and the new
cache entries. Prefill, and what the kernel does not take, computes with the same tiles where they are float, in the
order of their rows; beside FP8 tiles it has the ordinary weights.
"""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from kimi_k2.sharding.attention_tiles import CORES, OF_GROUP, group_shapes, shapes
from kimi_k2.sharding.experts.tiles import PARTITIONS

from .config import KimiK2InferenceConfig
from .early_router import EarlyLogits, reduced
from .kernels import NkiKernel, Result
from .products import dot_float32
from .tiles import TileWeights

MOST_SEQUENCES = 64
MOST_COLUMNS = 128  # of the residual, of an early router


def kernel_rotation(cosines: Tensor, sines: Tensor) -> Tensor:
    """What kernels take, float32 [2, rope, B], from [B, 1, rope / 2] each: both once a value, sines signed."""
    cos, sin = (part.squeeze(1).repeat_interleave(2, dim=1) for part in (cosines, sines))
    signs = torch.tensor([-1.0, 1.0], device=sin.device).repeat(sin.shape[1] // 2)
    return torch.stack((cos, sin * signs)).transpose(1, 2).contiguous()


def in_order_of_tiles(values: Tensor) -> Tensor:
    """Values along the last dimension in the order of a tile's rows: of each partition its value of every chunk."""
    return values.unflatten(-1, (-1, PARTITIONS)).mT.flatten(-2)


class AttentionTiles(nn.Module):
    """This rank's tiles, each with `weight` and, in FP8, `scale`: q_b, w_uk, w_uv and o.

    A MoE layer whose cache a group of ranks shares has OF_GROUP too, for the kernel of whole layers.
    """

    def __init__(self, config: KimiK2InferenceConfig, moe: bool = False) -> None:
        super().__init__()
        neuron = config.neuron_config
        ranks, fp8 = neuron.tp_degree, config.layout.attention_tiles(config.hf) == "fp8"
        self.heads, self.reduce_dtype = config.hf.num_attention_heads // ranks, neuron.rpl_reduce_dtype
        self.reduce_dtype = self.reduce_dtype or neuron.torch_dtype
        dtype = torch.float8_e4m3fn if fp8 else neuron.torch_dtype
        for name, cuts in shapes(config.hf, ranks).items():
            weight, scale = (
                (tuple(size // ranks if place == dim else size for place, size in enumerate(shape)), dim)
                for shape, dim in cuts
            )
            self.add_module(name, TileWeights(weight, scale, dtype, 1, ranks, 1))
        group = neuron.query_group if moe else 0
        for name, whole in group_shapes(config.hf, group).items() if group else ():
            weight, scale = (((CORES, *shape[1:]), 0) for shape in whole)
            self.add_module(name, TileWeights(weight, scale, dtype, 1, ranks, 1))

    def queries(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """q_b of float tiles: [B, S, q_lora_rank] to [B, S, h, 128] without position and [B, S, h, rope]."""
        q_b = self._held("q_b").flatten(0, 1)
        both = in_order_of_tiles(normed) @ q_b
        plain, rotary = both.split([self.heads * PARTITIONS, q_b.shape[1] - self.heads * PARTITIONS], dim=2)
        return plain.unflatten(2, (self.heads, -1)), rotary.unflatten(2, (self.heads, -1))

    def absorbed(self) -> Tensor:
        """W_UK of float tiles, [h, 128, rank]."""
        return self._held("w_uk").squeeze(2)

    def values(self, summed: Tensor) -> Tensor:
        """W_UV of float tiles: sums of latents [B, h, S, rank] to [B, S, h * 128]."""
        w_uv = self._held("w_uv").flatten(1, 2)
        return torch.einsum("bhsr,hrv->bshv", in_order_of_tiles(summed.to(w_uv.dtype)), w_uv).flatten(2)

    def output(self, values: Tensor, early: EarlyLogits | None, sequence_parallel: bool) -> Tensor:
        """o_proj of float tiles: [B, S, h * 128] to [B, S, H], summed over the ranks; `early.sums` is set.

        With `sequence_parallel` a rank's part of the sequence.
        """
        o_proj = self._held("o").flatten(0, 1)
        by_row = values.unflatten(2, (self.heads, -1)).mT.flatten(2)
        if early is not None:
            own = dot_float32(by_row, o_proj, ([2], [0]), ([], []))
            return reduced(own, early, early.part(values), values.dtype)
        group, part = parallel_state.get_tensor_model_parallel_group(), (by_row @ o_proj).to(self.reduce_dtype)
        out: Tensor
        if sequence_parallel:
            out = reduce_scatter_to_sequence_parallel_region(part, 1, process_group=group, dtype=values.dtype)
        else:
            out = reduce_from_tensor_model_parallel_region(part, process_group=group)
        return out.to(values.dtype)

    def of_group(self) -> dict[str, Tensor]:
        """OF_GROUP by the kernel's names; empty where there are none."""
        tensors: dict[str, Tensor] = {}
        for name in OF_GROUP:
            tile = getattr(self, name, None)
            if tile is not None:
                field = name.removeprefix("group_")
                tensors[field] = tile.weight
                if tile.scale is not None:
                    tensors[f"{field}_scales"] = tile.scale
        return tensors

    def _held(self, name: str) -> Tensor:
        tile = self.get_submodule(name)
        assert isinstance(tile, TileWeights)
        return tile.weight

    def arguments(self) -> tuple[dict[str, Tensor], dict[str, None]]:
        """What the kernel calls them: tensors, and the scales that float tiles do not have."""
        tensors: dict[str, Tensor] = {}
        absent: dict[str, None] = {}
        for name, tile in self.named_children():
            assert isinstance(tile, TileWeights)
            if name in OF_GROUP:
                continue
            tensors[f"{name}_tiles"] = tile.weight
            if tile.scale is None:
                absent[f"{name}_scales"] = None
            else:
                tensors[f"{name}_scales"] = tile.scale
        return tensors, absent


class AttentionBlockKernel(NkiKernel):
    """`kimi_k2.nki.kernels.attention.attention_decode` of one token a sequence."""

    name = "attention_decode"

    def takes(self, projected: Tensor, slots: int, early: EarlyLogits | None) -> bool:
        """Whether the kernel takes these down projections [B, S, N], so many slots, and such a router."""
        batch, length = projected.shape[:2]
        fits = early is None or early.router.residual_weight.shape[0] <= MOST_COLUMNS
        one = length == 1 and batch <= MOST_SEQUENCES
        return self.runs_on(projected.device) and one and fits and slots % (128 * self.cores) == 0

    def __call__(
        self,
        projected: Tensor,
        norms: tuple[Tensor, Tensor],
        tiles: AttentionTiles,
        rotation: tuple[Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        lengths: Tensor,
        options: dict[str, Any],
        early: EarlyLogits | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """This rank's part of the output.

        Args:
            projected: [B, 1, q_lora_rank + rank + rope].
            norms: weights of q_a_layernorm and kv_a_layernorm.
            tiles: this rank's weights.
            rotation: cosines and sines, float32 [B, 1, rope / 2].
            cache: rotary keys [B, S, rope] and latents [B, S, rank], whole.
            lengths: [B], slots in use.
            options: the kernel's numbers: `softmax_scale`, `eps`, `attended` of the S slots.
            early: the layer's router logits.

        Returns:
            (output float32 [B, 1, H], to be summed over the ranks; new latents [B, 1, rank]; new keys [B, 1, rope];
            this rank's summand of the logits float32 [B, 1, E]).
        """
        dtype, qkv_a = projected.dtype, projected.squeeze(1)
        keys, latents = (part.to(dtype) for part in cache)
        tensors, absent = tiles.arguments()
        named = {
            **tensors,
            "rotation": kernel_rotation(*rotation),
            "latents": latents,
            "keys": keys,
            "lengths": lengths.to(torch.int32).unsqueeze(1),
        }
        batch, hidden = len(qkv_a), tensors["o_tiles"].shape[2]
        results: list[Result] = [
            ((batch, hidden // 128, 128), torch.float32),
            ((batch, latents.shape[2]), dtype),
            ((batch, keys.shape[2]), dtype),
        ]
        if early is not None:
            router = early.router
            named["residual"] = router.own_columns(early.residual, early.rank).squeeze(1).to(dtype)
            named["early_residual"], named["early_heads"] = router.residual_weight, router.heads_weight
            results.append(((batch, router.residual_weight.shape[1]), torch.float32))
        first = [qkv_a.to(dtype), *(weight.to(dtype) for weight in norms)]
        made = self.run(first, {**absent, **options}, results, named=named)
        out, new_latents, new_keys = (part.unsqueeze(1) for part in made[:3])
        logits = None if early is None else made[3].unsqueeze(1)
        return out.flatten(2), new_latents, new_keys, logits
