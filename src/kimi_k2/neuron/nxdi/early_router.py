"""The router's logits of a decode step, summed over the ranks in the all-reduce of the attention's output.

`kimi_k2.sharding.early_router` has the formula and the weights: a rank reads hidden / ranks + heads * v_head_dim of
their rows. The one all-reduce carries logits and output in float32. noaux_tc chooses by float32 scores, and sums of
many ranks in BF16 would change the choice. torch_xla makes an all-reduce for each dtype, so logits in float32 beside an
output in BF16 would be one more collective; the 30 KB of a token cost latency, not bandwidth. The attention's output is
then rounded once, where an all-reduce in BF16 rounds each rank's part and the sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.parallel_layers.layers import BaseParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.mappings import reduce_from_tensor_model_parallel_region
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from kimi_k2.sharding.early_router import DTYPE

from .config import KimiK2InferenceConfig
from .products import dot_float32


class EarlyRouter(BaseParallelLinear):
    """This rank's rows of the folded weights, float32: [H / ranks, E] and [heads * v_head_dim, E]."""

    residual_weight: nn.Parameter
    heads_weight: nn.Parameter

    def __init__(self, config: KimiK2InferenceConfig) -> None:
        super().__init__()
        hf, self.ranks = config.hf, config.neuron_config.tp_degree
        self.eps = hf.rms_norm_eps
        values = hf.num_attention_heads * hf.v_head_dim
        for name, rows in (("residual_weight", hf.hidden_size), ("heads_weight", values)):
            weight = nn.Parameter(
                torch.empty(rows // self.ranks, hf.n_routed_experts, dtype=DTYPE), requires_grad=False
            )
            self.register_parameter(name, weight)
            # Marked once it is registered: NxD's init_on_device makes a parameter anew and takes its attributes amiss.
            weight = self.get_parameter(name)
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1, num_partitions=self.ranks)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EarlyRouter:
        """Move with the model, but stay in float32."""
        kept = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        super()._apply(fn, recurse)
        for name, parameter in self.named_parameters():
            parameter.data = kept[name].to(parameter.device)
        return self

    def own_columns(self, residual: Tensor, rank: Tensor) -> Tensor:
        """This rank's columns of a residual [B, S, H]; `rank` is int [1]."""
        return residual.unflatten(2, (self.ranks, -1)).index_select(2, rank).squeeze(2)

    def forward(self, residual: Tensor, values: Tensor, rank: Tensor) -> Tensor:
        """This rank's summand of the logits before the norm's scalar.

        Args:
            residual: [B, S, H], what the attention's norm was given; the same on all ranks.
            values: [B, S, heads * v_head_dim], this rank's input of o_proj.
            rank: int [1], this rank's number.

        Returns:
            float32 [B, S, E].
        """
        parts = ((self.own_columns(residual, rank), self.residual_weight), (values, self.heads_weight))
        first, second = (dot_float32(x.to(DTYPE), weight, ([2], [0]), ([], [])) for x, weight in parts)
        return first + second


class EarlyLogits:
    """One layer's logits on their way through the all-reduce.

    Args:
        router: the layer's weights.
        residual, rank: as in `EarlyRouter.forward`.

    Attributes:
        sums: float32 [B, S, E], once they are reduced.
    """

    def __init__(self, router: EarlyRouter, residual: Tensor, rank: Tensor) -> None:
        self.router, self.residual, self.rank = router, residual, rank
        self.sums: Tensor | None = None

    def part(self, values: Tensor) -> Tensor:
        """This rank's summand, float32 [B, S, E]."""
        part: Tensor = self.router(self.residual, values, self.rank)
        return part

    def logits(self, hidden_states: Tensor) -> Tensor:
        """The router's logits, float32 [T, E].

        Args:
            hidden_states: [B, S, H], what the norm before the experts is given.
        """
        assert self.sums is not None
        squares = hidden_states.to(DTYPE).square().mean(dim=2, keepdim=True)
        return (self.sums * torch.rsqrt(squares + self.router.eps)).flatten(0, 1)


class Early(Protocol):
    """What is summed together with a projection's output: a rank's `part` of it before, `sums` behind."""

    sums: Tensor | None

    def part(self, values: Tensor) -> Tensor:
        """This rank's summand, float32 [B, S, N], from the projection's input."""
        ...


class OutputProjection(RowParallelLinear):
    """o_proj or a dense MLP's down_proj, in whose all-reduce what is linear in its output can ride."""

    def forward(self, values: Tensor, early: Early | None = None) -> Tensor:
        """[B, S, inputs of this rank] to [B, S, H], summed over the ranks; `early.sums` is set."""
        if early is None:
            plain: Tensor = super().forward(values)
            return plain
        own = dot_float32(values, self.weight, ([2], [1]), ([], []))
        return reduced(own, early, early.part(values), values.dtype)


def reduced(own: Tensor, early: Early | None, part: Tensor | None, dtype: torch.dtype) -> Tensor:
    """This rank's output float32 [B, S, H], summed over the ranks, in `dtype`; `early.sums` is set from `part`."""
    group: Any = parallel_state.get_tensor_model_parallel_group()
    if early is None or part is None:
        out: Tensor = reduce_from_tensor_model_parallel_region(own.to(dtype), process_group=group)
        return out
    both = reduce_from_tensor_model_parallel_region(torch.cat((own, part), dim=2), process_group=group)
    out, early.sums = both.split([own.shape[2], part.shape[2]], dim=2)
    return out.to(dtype)
