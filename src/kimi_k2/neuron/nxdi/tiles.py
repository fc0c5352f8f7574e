"""Routed experts in FP8 blocks or in the NKI kernel's tiles (`kimi_k2.sharding.experts`), for NxD's expert MLPs.

Prefill, and whatever else does not run the kernel, computes with the same tiles in PyTorch: gate and up contract the
hidden states in the order of the tiles' rows, so that no expert is held twice.
"""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import BaseParallelLinear
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn import functional as F

from kimi_k2.contrib_model.layers import dot_float32
from kimi_k2.errors import ConfigError
from kimi_k2.sharding.experts.tiles import PARTITIONS


class TileWeights(BaseParallelLinear):
    """A weight of all local experts and its scales, with the attributes by which NxD cuts them.

    Args:
        weight: this rank's shape, and the dimension that the ranks of an expert divide.
        scale: the same of the scales; float weights have none.
        dtype: of the weight; FP8 weights have scales.
        stride: sections that are divided one by one: 2 for gate and up.
        tp, ep: sizes of the experts' process groups.
    """

    weight: nn.Parameter
    scale: nn.Parameter | None

    def __init__(
        self,
        weight: tuple[tuple[int, ...], int],
        scale: tuple[tuple[int, ...], int],
        dtype: torch.dtype,
        stride: int,
        tp: int,
        ep: int,
    ) -> None:
        super().__init__()
        self._n_local_experts = weight[0][0]
        self.register_parameter("bias", None)
        self.register_parameter("scale", None)
        self._hold("weight", *weight, dtype, stride, tp, ep)
        if dtype.itemsize == 1:
            self._hold("scale", *scale, torch.float32, stride, tp, ep)

    def _hold(
        self, name: str, shape: tuple[int, ...], dim: int, dtype: torch.dtype, stride: int, tp: int, ep: int
    ) -> None:
        self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
        # Marked once it is registered: NxD's init_on_device makes a parameter anew and takes its attributes amiss.
        parameter = self.get_parameter(name)
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=stride, num_partitions=tp)
        if ep > 1:
            marked: Any = parameter
            marked.expert_model_parallel = marked.is_prefill = True
            marked.expert_distribution = None

    def chosen(self, experts: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weights and scales of some experts, [E', ...]; of all if None."""
        if experts is None:
            return self.weight, self.scale
        if self.weight.dtype.itemsize == 1 and self.weight.device.type == "cpu":
            # PyTorch cannot index FP8 on a CPU.
            weight = self.weight.view(torch.uint8)[experts].view(self.weight.dtype)
        else:
            weight = self.weight[experts]
        return weight, None if self.scale is None else self.scale[experts]

    def scales(self) -> Tensor:
        """The scales, float32; of float weights ones of the same shape as gate and up's, or down's."""
        if self.scale is not None:
            return self.scale
        count, *inner = self.weight.shape
        halves, blocks = (2, inner[1]) if len(inner) == 3 else (1, inner[1] // PARTITIONS)
        return torch.ones(count, halves, blocks, dtype=torch.float32, device=self.weight.device)


class TiledExperts(nn.Module):
    """What NxD's `Experts` is, on tiles: SwiGLU of tokens by experts.

    Args:
        local: experts that this rank holds.
        hidden: width of the model.
        width: this rank's columns of an expert.
        dtype: of the weights.
        tp, ep: sizes of the experts' process groups.
        early: columns of the next layer's down projections that are held folded with these experts' own, and their
            dtype (`early_qkv_a`); None without.
    """

    def __init__(
        self,
        local: int,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        tp: int,
        ep: int,
        early: tuple[int, torch.dtype] | None = None,
    ) -> None:
        super().__init__()
        self.early_qkv_a: TileWeights | None = None
        if early is not None:
            self.early_qkv_a = TileWeights(((local, width, early[0]), 1), ((), 0), early[1], 1, tp, ep)
        blocks = hidden // PARTITIONS
        gate_up, gate_up_scale = (local, PARTITIONS, blocks, 2 * width), (local, 2, blocks)
        self.gate_up_proj = TileWeights((gate_up, 3), (gate_up_scale, 1), dtype, 2, tp, ep)
        self.down_proj = TileWeights(((local, width, hidden), 1), ((local, 1, blocks), 1), dtype, 1, tp, ep)

    def alone(self) -> dict[str, Tensor]:
        """`tiles` of a stack of one expert, by name, without that dimension and without the scales of float weights."""
        names = ("gate_up", "gate_up_scales", "down", "down_scales")
        parts = {name: part.squeeze(0) for name, part in zip(names, self.tiles(), strict=True)}
        floats = self.gate_up_proj.scale is None
        return {name: part for name, part in parts.items() if not (floats and name.endswith("_scales"))}

    def tiles(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the kernel takes: gate and up [E, 128, H/128, 2 I], scales [E, 2, H/128], down [E, I, H], [E, H/128]."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return gate_up.weight, gate_up.scales(), down.weight, down.scales().squeeze(1)

    def forward(self, hidden_states: Tensor, expert_indices: Tensor | None = None) -> Tensor:
        """Tokens [E' or 1, T, H] through all local experts, or those of `expert_indices` [E']: [E', T, H]."""
        return self.down(self.inner(hidden_states, expert_indices), expert_indices)

    def inner(self, hidden_states: Tensor, expert_indices: Tensor | None = None) -> Tensor:
        """silu(gate) * up of the same, [E', T, I]."""
        dtype = hidden_states.dtype
        weight, scale = self.gate_up_proj.chosen(expert_indices)
        if scale is not None:
            # The blocks lie along the sum, so they are applied before it.
            factors = scale.mT.repeat_interleave(weight.shape[3] // 2, dim=2).unsqueeze(1)
            weight = weight.to(torch.float32) * factors
        blocks = weight.shape[2]
        in_order = hidden_states.unflatten(2, (blocks, PARTITIONS)).mT.flatten(2)
        gate, up = torch.einsum("eth,ehi->eti", in_order, weight.to(dtype).flatten(1, 2)).chunk(2, dim=2)
        return F.silu(gate) * up

    def down(self, inner: Tensor, expert_indices: Tensor | None = None) -> Tensor:
        """[E', T, I] to [E', T, H]."""
        dtype = inner.dtype
        weight, scale = self.down_proj.chosen(expert_indices)
        blocks = weight.shape[2] // PARTITIONS
        out = torch.einsum("eti,eih->eth", inner, weight.to(dtype))
        if scale is not None:
            # One row of blocks: their scales belong to the outputs.
            out = (out.unflatten(2, (blocks, PARTITIONS)).to(torch.float32) * scale.unsqueeze(3)).flatten(2).to(dtype)
        return out


class BlockExperts(nn.Module):
    """What NxD's `Experts` is, on FP8 weights with a scale a block: SwiGLU of tokens by experts.

    NxD multiplies each weight by its scale and rounds it again, so that a decode step writes and reads every chosen
    expert in float32 and BF16. Here a block's product, summed in float32, is scaled: of the weights there is no array
    but the operand of that product. Beside as many tokens as a block has rows the products would be larger than the
    weights, which are scaled then.

    Args:
        local: experts that this rank holds.
        hidden: width of the model.
        width: this rank's columns of an expert.
        block: rows and columns of a block.
        tp, ep: sizes of the experts' process groups.

    Raises:
        ConfigError: a rank's columns do not divide into blocks.
    """

    def __init__(self, local: int, hidden: int, width: int, block: int, tp: int, ep: int) -> None:
        super().__init__()
        if hidden % block or width % block:
            raise ConfigError(
                f"a rank's {width} columns of an expert do not divide into blocks of {block}",
                field="quantization_block_size",
            )
        self.block = block
        sizes = {"gate_up_proj": ((hidden, 2 * width), 2, 2), "down_proj": ((width, hidden), 1, 1)}
        for name, (shape, dim, stride) in sizes.items():
            weight, scale = ((local, *shape), dim), ((local, *(size // block for size in shape)), dim)
            self.add_module(name, TileWeights(weight, scale, torch.float8_e4m3fn, stride, tp, ep))

    def forward(self, hidden_states: Tensor, expert_indices: Tensor | None = None) -> Tensor:
        """Tokens [E' or 1, T, H] through all local experts, or those of `expert_indices` [E']: [E', T, H]."""
        gate, up = self._product("gate_up_proj", hidden_states, expert_indices).chunk(2, dim=2)
        return self._product("down_proj", F.silu(gate) * up, expert_indices)

    def _product(self, name: str, x: Tensor, expert_indices: Tensor | None) -> Tensor:
        """[E' or 1, T, K] by weights [E', K, N]: [E', T, N]."""
        projection: Any = self.get_submodule(name)
        weight, scale = projection.chosen(expert_indices)
        scale = scale.repeat_interleave(self.block, dim=2)
        x = x.expand(len(weight), -1, -1)
        if x.shape[1] >= self.block:
            scaled = weight.to(torch.float32) * scale.repeat_interleave(self.block, dim=1)
            return torch.bmm(x, scaled.to(x.dtype))
        rows, columns = weight.to(x.dtype).unflatten(1, (-1, self.block)), x.unflatten(2, (-1, self.block))
        parts = dot_float32(columns, rows, ([3], [2]), ([0, 2], [0, 1]))  # [E', K / block, T, N]
        return (parts * scale.unsqueeze(2)).sum(dim=1).to(x.dtype)
