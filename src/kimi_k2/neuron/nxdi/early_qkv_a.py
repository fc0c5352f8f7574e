"""q_a and kv_a of a decode step, summed over the ranks in the all-reduce of the feed-forward output before them.

`kimi_k2.sharding.early_qkv_a` has the formula and the weights. A layer's one all-reduce behind its experts (or its
dense MLP) carries the output and the next layer's down projections, so that their all-gather, and the norm before it,
are gone. It is in float32: in BF16 each rank's summands, and each partial sum, would be rounded. The norm's scalar is
applied behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.modules.moe.model import MoE
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import BaseParallelLinear
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from .config import KimiK2InferenceConfig
from .products import dot_float32


class EarlyProjections(BaseParallelLinear):
    """This rank's rows of a layer's weights beside its experts in tiles: [H / ranks, N], and [width / ranks, N].

    N is q_lora_rank + cache_dim; they are of the layer behind. The second is of a dense MLP, or of a shared expert that
    is three linears.

    Args:
        values: width of such an MLP on all ranks, 0 where there is none.
    """

    residual_weight: nn.Parameter
    values_weight: nn.Parameter

    def __init__(self, config: KimiK2InferenceConfig, values: int) -> None:
        super().__init__()
        hf, neuron = config.hf, config.neuron_config
        self.ranks, self.eps = neuron.tp_degree, hf.rms_norm_eps
        rows = {"residual_weight": hf.hidden_size, **({"values_weight": values} if values else {})}
        for name, size in rows.items():
            shape = (size // self.ranks, hf.qkv_a_dim)
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=neuron.torch_dtype), False))
            # Marked once it is registered: NxD's init_on_device makes a parameter anew and takes its attributes amiss.
            weight = self.get_parameter(name)
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1, num_partitions=self.ranks)

    def of_residual(self, residual: Tensor, rank: Tensor) -> Tensor:
        """This rank's summand of a residual [B, S, H] that all ranks hold, float32 [B, S, N]; `rank` is int [1]."""
        own = residual.unflatten(2, (self.ranks, -1)).index_select(2, rank).squeeze(2)
        return dot_float32(own, self.residual_weight, ([2], [0]), ([], []))

    def of_values(self, values: Tensor) -> Tensor:
        """This rank's summand of what goes into down_proj, [B, S, width / ranks]: float32 [B, S, N]."""
        return dot_float32(values, self.values_weight, ([2], [0]), ([], []))


class Following:
    """A step's down projections on their way from layer to layer.

    Args:
        rank: int [1], this rank's number.

    Attributes:
        sums: float32 [B, S, N] of the layer that comes next, before the norm's scalar; None where it projects itself.
    """

    def __init__(self, rank: Tensor) -> None:
        self.rank = rank
        self.sums: Tensor | None = None
        self._given: tuple[EarlyProjections, Tensor] | None = None

    def take(self, hidden_states: Tensor, eps: float) -> Tensor | None:
        """The down projections [B, S, N] of the normed hidden states [B, S, H], if they are known."""
        sums = self.take_sums()
        if sums is None:
            return None
        squares = hidden_states.to(torch.float32).square().mean(dim=2, keepdim=True)
        return (sums * torch.rsqrt(squares + eps)).to(hidden_states.dtype)

    def take_sums(self) -> Tensor | None:
        """The same without the norm's scalar, float32."""
        sums, self.sums = self.sums, None
        return sums

    def begin(self, weights: EarlyProjections, residual: Tensor) -> None:
        """A layer is about to compute its feed-forward beside this residual, [B, S, H]."""
        self._given = (weights, residual)

    def part(self, values: Tensor) -> Tensor:
        """Of a dense MLP: this rank's summand, float32 [B, S, N]; see `early_router.OutputProjection`."""
        assert self._given is not None
        weights, residual = self._given
        return weights.of_residual(residual, self.rank) + weights.of_values(values)

    def part_with(self, experts: Tensor, values: Tensor | None) -> Tensor:
        """Of a layer with experts: this rank's summand with theirs, both float32 [B, S, N].

        Args:
            experts: of those in tiles.
            values: what goes into the down_proj of a shared expert that is three linears, [B, S, width / ranks].
        """
        assert self._given is not None
        weights, residual = self._given
        part = weights.of_residual(residual, self.rank) + experts
        return part if values is None else part + weights.of_values(values)


class KimiK2MoE(MoE):
    """NxD's MoE, in whose all-reduce the next layer's down projections can be summed."""

    def forward(
        self, hidden_states: Tensor, padding_mask: Tensor | None = None, following: Following | None = None, **more: Any
    ) -> tuple[Tensor, ...]:
        """[B, S, H] to a tuple with the same; with `following`, a decode step, its `sums` are set."""
        if following is None:
            out: tuple[Tensor, ...] = super().forward(hidden_states, padding_mask, **more)
            return out
        _, affinities, index = self.router(hidden_states)
        parts = self.expert_mlps.forward_early(hidden_states.flatten(0, 1), affinities, index)
        output, columns = (part.view(*hidden_states.shape[:2], -1) for part in parts)
        values = None
        if self.shared_experts is not None:
            shared: Any = self.shared_experts
            values = shared.act_fn(shared.gate_proj(hidden_states)) * shared.up_proj(hidden_states)
            output = output + shared.down_proj(values)
        both = torch.cat((output, following.part_with(columns, values)), dim=2)
        group = parallel_state.get_world_group() if self.ep_enabled else self.tensor_parallel_group
        both = reduce_from_tensor_model_parallel_region(both, process_group=group)
        output, following.sums = both.split([output.shape[2], columns.shape[2]], dim=2)
        return (output.to(hidden_states.dtype),)
