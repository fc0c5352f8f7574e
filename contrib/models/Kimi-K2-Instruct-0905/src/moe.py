"""Mixture of experts: the router, routed experts under tensor and expert parallelism, the shared expert.

A rank holds `n_routed_experts / moe_ep_degree` experts, and of each its part of the columns. All ranks' stacks lie one
behind the other in a checkpoint's tensor, so NxD cuts them along dimension 0 like any weight: no process groups of
experts, no patch of NxD. One all-reduce sums the parts of all ranks, shared expert included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from neuronx_distributed.modules.moe.routing import RouterTopK
from neuronx_distributed.parallel_layers.layers import BaseParallelLinear
from neuronx_distributed.parallel_layers.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from neuronx_distributed.parallel_layers.utils import set_tensor_model_parallel_attributes
from torch import Tensor, nn
from torch.nn import functional as F

from .checkpoint import EXPERT_CUTS
from .layers import KimiK2MLP, dot_float32
from .quantization import BLOCKWISE, E4M3

NORM_GUARD = 1e-20


class KimiK2Router(RouterTopK):
    """noaux_tc: selects by sigmoid(logits) + bias, weighs by sigmoid(logits) alone.

    The bias balances the experts' load in training and is no part of a weight; it stays float32, because rounded to
    BF16 it changes nearly every token's set of experts. NxD's own routers cannot: RouterTopK has no such bias, and
    GroupLimitedRouter rounds the scores to the hidden states' dtype before it selects. NxD computes in float64, which
    the device has not; float32 it is here, with `--auto-cast=none`.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(
            num_experts=config.n_routed_experts, top_k=config.num_experts_per_tok, hidden_size=config.hidden_size,
            act_fn="sigmoid", dtype=config.neuron_config.torch_dtype, device=None,
        )  # fmt: skip
        self.norm_topk_prob, self.routed_scaling_factor = config.norm_topk_prob, config.routed_scaling_factor
        # Not zeros: a constant would be folded into the graph, and the loaded values would have no effect.
        bias = torch.linspace(-1.0, 1.0, config.n_routed_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route.

        Args:
            hidden_states: [..., H], T tokens.

        Returns:
            float32 logits [T, E]; final float32 weights [T, top_k] of the chosen experts, int64 [T, top_k].
        """
        tokens = hidden_states.reshape(-1, self.hidden_size)
        logits = dot_float32(tokens, self.linear_router.weight, ([1], [1]))
        scores = torch.sigmoid(logits)
        chosen = torch.topk(scores + self.e_score_correction_bias, self.top_k, dim=1).indices.to(torch.long)
        weights = scores.gather(1, chosen)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=1, keepdim=True) + NORM_GUARD)
        return logits, weights * self.routed_scaling_factor, chosen


class Held(NamedTuple):
    """Shape on a rank, dtype, and where it is cut: see `checkpoint.EXPERT_CUTS`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cut: tuple[int, int]


class ExpertWeights(BaseParallelLinear):
    """One projection of all experts of this rank: `weight`, and of FP8 its `scale`.

    Args:
        held: of each parameter, by name.
        ranks: all ranks.
    """

    def __init__(self, held: Mapping[str, Held], ranks: int) -> None:
        super().__init__()
        self.register_parameter("scale", None)
        for name, (shape, dtype, cut) in held.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False))
            # Marked once it is registered: NxD's init_on_device makes a parameter anew and drops its attributes.
            self.mark(self.get_parameter(name), cut, ranks)

    def mark(self, parameter: Any, cut: tuple[int, int], ranks: int) -> None:
        """Set the attributes by which a parameter is cut."""
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1, num_partitions=ranks)
        parameter.expert_cut = cut

    def of_expert(self, experts: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weights and scales of some local experts, [E', ...]; of all for None."""
        if experts is None:
            return self.weight, self.scale
        if self.weight.dtype == E4M3 and self.weight.device.type == "cpu":  # where PyTorch cannot index FP8
            weight = self.weight.view(torch.uint8)[experts].view(E4M3)
        else:
            weight = self.weight[experts]
        return weight, None if self.scale is None else self.scale[experts]


class KimiK2Experts(nn.Module):
    """The routed experts of this rank."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        neuron = config.neuron_config
        self.tp, self.ep = neuron.moe_tp_degree, neuron.moe_ep_degree
        self.num_local_experts = config.n_routed_experts // self.ep
        self.block_size = neuron.blockwise_matmul_config.block_size
        self.rows_at_once = neuron.prefill_rows_at_once
        self.blockwise = neuron.quantized and neuron.quantization_type == BLOCKWISE
        self.side = neuron.quantization_block_size[0] if self.blockwise else 0
        self.make_weights(config)

    def make_weights(self, config: Any) -> None:
        """The two projections, [E_local, H, 2 I] (gate, then up) and [E_local, I, H]."""
        hidden, width, neuron = config.hidden_size, config.moe_intermediate_size // self.tp, config.neuron_config
        for name, (size, columns) in {"gate_up_proj": (hidden, 2 * width), "down_proj": (width, hidden)}.items():
            shapes = {"weight": ((size, columns), E4M3 if neuron.quantized else neuron.torch_dtype)}
            if neuron.quantized:
                shapes["scale"] = (
                    (size // self.side, columns // self.side) if self.blockwise else (1, columns), torch.float32
                )  # fmt: skip
            held = {
                suffix: Held((self.num_local_experts, *shape), dtype, EXPERT_CUTS[f"{name}.{suffix}"])
                for suffix, (shape, dtype) in shapes.items()
            }
            self.add_module(name, ExpertWeights(held, neuron.tp_degree))

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor, rank: Tensor, *, decode: bool) -> Tensor:
        """This rank's part of the experts' output, to be summed over the ranks.

        Args:
            tokens: [T, H].
            weights: float32 [T, top_k], of `KimiK2Router`.
            chosen: int64 [T, top_k], global numbers.
            rank: int [1], this rank's number.
            decode: whether these are a step's tokens.

        Returns:
            float32 [T, H].
        """
        slots, weights = self.local(weights, chosen, rank)
        if self.is_selective(chosen):
            return self.forward_selective(tokens, slots, weights)
        if decode or chosen.numel() < self.block_size:
            return self.forward_all(tokens, slots, weights)
        return self.forward_blocks(tokens, slots, weights)

    def is_selective(self, chosen: Tensor) -> bool:
        """Whether loading an expert a choice reads fewer bytes than loading all local experts once."""
        return chosen.numel() < self.num_local_experts

    def first_expert(self, rank: Tensor) -> Tensor:
        """Global number of this rank's first expert, int64 [1]."""
        return rank.to(torch.long).div(self.tp, rounding_mode="floor") * self.num_local_experts

    def local(self, weights: Tensor, chosen: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        """The choices as local numbers [T, top_k], and their weights; those of other ranks are 0 with a weight of 0."""
        if self.ep == 1:
            return chosen, weights
        slots = chosen - self.first_expert(rank)
        here = (slots >= 0) & (slots < self.num_local_experts)
        return torch.where(here, slots, torch.zeros_like(slots)), weights * here.to(weights.dtype)

    def mlp(self, x: Tensor, experts: Tensor | None = None) -> Tensor:
        """SwiGLU of [E' or 1, T, H] by all local experts or by `experts` [E']: [E', T, H]."""
        gate, up = self.product(self.gate_up_proj, x, experts).chunk(2, dim=2)
        return self.product(self.down_proj, F.silu(gate) * up, experts)

    def product(self, projection: Any, x: Tensor, experts: Tensor | None) -> Tensor:
        """[E' or 1, T, K] by weights [E', K, N]: [E', T, N]."""
        weight, scale = projection.of_expert(experts)
        x = x.expand(len(weight), -1, -1)
        if scale is None:
            return torch.bmm(x, weight)
        if not self.blockwise:  # one scale an output: after the product
            return (dot_float32(x, weight.to(x.dtype), ([2], [1]), ([0], [0])) * scale).to(x.dtype)
        scale = scale.repeat_interleave(self.side, dim=2)
        if x.shape[1] >= self.side:  # the products of blocks would be larger than the weights
            scaled = weight.to(torch.float32) * scale.repeat_interleave(self.side, dim=1)
            return torch.bmm(x, scaled.to(x.dtype))
        rows, columns = weight.to(x.dtype).unflatten(1, (-1, self.side)), x.unflatten(2, (-1, self.side))
        products = dot_float32(columns, rows, ([3], [2]), ([0, 2], [0, 1]))  # [E', K / side, T, N]
        return (products * scale.unsqueeze(2)).sum(dim=1).to(x.dtype)

    def forward_selective(self, tokens: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Load the chosen experts alone: T * top_k slots of static shape, those of other ranks weighing nothing."""
        repeated = tokens.repeat_interleave(slots.shape[1], dim=0).unsqueeze(1)  # [T * top_k, 1, H]
        out = self.mlp(repeated, slots.flatten()).squeeze(1).unflatten(0, slots.shape)
        return (out.to(torch.float32) * weights.unsqueeze(-1)).sum(dim=1)

    def forward_all(self, tokens: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """All local experts on all tokens."""
        numbers = torch.arange(self.num_local_experts, device=slots.device)
        weights = ((slots.unsqueeze(-1) == numbers) * weights.unsqueeze(-1)).sum(dim=1)  # [T, E_local], exact
        out = self.mlp(tokens.unsqueeze(0))  # [E_local, T, H]
        return (out.to(torch.float32) * weights.T.unsqueeze(-1)).sum(dim=0)

    def forward_blocks(self, tokens: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """Dropless prefill: each expert's tokens in blocks of `block_size` rows, a group of blocks an operation.

        The number of blocks is what the worst distribution needs, so no token is ever dropped.
        """
        count, choices = slots.shape
        size, experts = self.block_size, self.num_local_experts
        rows = count * min(choices, experts)  # choices that can be local
        blocks = (rows + (size - 1) * min(experts, rows)) // size
        here = weights != 0  # a choice that weighs nothing, such as another rank's, takes no row
        numbers = torch.arange(experts, device=slots.device)
        mask = ((slots.unsqueeze(-1) == numbers) & here.unsqueeze(-1)).any(dim=1).to(torch.float32)  # [T, E_local]
        before = torch.cumsum(mask, dim=0) - mask  # exact: whole numbers far below 2^24
        needed = ((mask.sum(dim=0) + (size - 1)) / size).floor()
        end = torch.cumsum(needed, dim=0)
        first = (end - needed) * size
        row_of = (first + before).gather(1, slots).to(torch.long)  # row of each choice
        # Another rank's choices all write row `blocks * size`, which is cut off.
        row_of = torch.where(here, row_of, torch.full_like(row_of, blocks * size))
        source = torch.full((blocks * size + 1,), count, dtype=torch.long, device=slots.device)
        of_choice = torch.arange(count, device=slots.device).unsqueeze(1).expand(-1, choices)
        source = source.scatter(0, row_of.flatten(), of_choice.flatten())[:-1].view(blocks, size)
        of_block = (torch.arange(blocks, device=slots.device).unsqueeze(1) >= end).sum(dim=1).clamp(max=experts - 1)
        padded = F.pad(tokens, (0, 0, 0, 1))  # an empty row reads zeros
        out = torch.zeros(count, tokens.shape[1], dtype=torch.float32, device=tokens.device)
        most = max(self.rows_at_once // size, 1)
        step = -(-blocks // -(-blocks // most))  # groups of one size hold the least
        for start in range(0, blocks, step):
            group = slice(start, start + step)
            result = self.mlp(padded[source[group]], of_block[group]).flatten(0, 1)
            at = row_of - start * size
            inside = here & (at >= 0) & (at < len(result))
            at = torch.where(inside, at, torch.zeros_like(at))
            for choice in range(choices):
                weighted = result[at[:, choice]].to(torch.float32) * weights[:, choice, None]
                # Chosen, not multiplied by 0: another token's row may hold what is not finite.
                out = torch.where(inside[:, choice, None], out + weighted, out)
        return out


class KimiK2MoE(nn.Module):
    """Router, routed experts and shared expert of a layer."""

    def __init__(self, config: Any, experts_cls: Callable[[Any], nn.Module] = KimiK2Experts) -> None:
        super().__init__()
        neuron = config.neuron_config
        self.sequence_parallel = neuron.sequence_parallel_enabled
        self.reduce_dtype = neuron.rpl_reduce_dtype or neuron.torch_dtype
        self.decode = neuron.is_prefill_stage is False
        self.router = KimiK2Router(config)
        self.experts = experts_cls(config)
        self.shared_experts = self.make_shared(config) if config.n_shared_experts else None

    def make_shared(self, config: Any) -> nn.Module:
        """The shared expert, whose output is this rank's part of the sum."""
        return KimiK2MLP(config, config.moe_intermediate_size * config.n_shared_experts, reduce=False)

    def forward(self, hidden_states: Tensor, rank: Tensor) -> Tensor:
        """[B, S, H] to the same, cut along S with sequence parallelism; `rank` int [1] is this rank's number."""
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, 1)
        tokens = hidden_states.flatten(0, 1)
        _, weights, chosen = self.router(tokens)
        decode = self.decode or hidden_states.shape[1] == 1
        out = self.experts(tokens, weights, chosen, rank, decode=decode).view(hidden_states.shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden_states).to(torch.float32)
        out = out.to(self.reduce_dtype)
        if self.sequence_parallel:
            out = reduce_scatter_to_sequence_parallel_region(out, 1)
        else:
            out = reduce_from_tensor_model_parallel_region(out)
        return out.to(hidden_states.dtype)
