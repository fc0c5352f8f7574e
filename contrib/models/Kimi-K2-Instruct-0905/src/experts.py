"""Routed experts on NxD: ExpertMLPsV2 that also loads selectively under expert parallelism, and never drops a token."""

from __future__ import annotations

import torch
from neuronx_distributed.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from torch import Tensor

# At 128 tokens a block this makes 59 MB of activations; more blocks at once make a smaller graph.
BLOCKS_AT_ONCE = 32


class KimiK2ExpertMLPs(ExpertMLPsV2):
    """ExpertMLPsV2 whose choice of path is right under expert parallelism (EP).

    Upstream refuses selective loading with EP at decode and, for short prompts, indexes the local weights with global
    expert numbers. Here every path knows which experts the rank holds. The router's weights are final, so nothing is
    normalised again. Reduction over ranks is left to the MoE module: one all-reduce for all paths.
    """

    @property
    def num_local_experts(self) -> int:
        """Experts that this rank holds."""
        return int(self.get_mlp_op().gate_up_proj._n_local_experts)

    def forward(
        self,
        hidden_states: Tensor,
        expert_affinities: Tensor,
        expert_index: Tensor,
        seq_len: int,
        padding_mask: Tensor | None = None,
        expert_affinities_masked_full: Tensor | None = None,
    ) -> Tensor:
        """Compute this rank's part of the experts' output.

        Args:
            hidden_states: [T, H].
            expert_affinities: [T, E], final weights.
            expert_index: int64 [T, top_k], global expert numbers.
            seq_len: 1 at decode.

        Returns:
            [T, H], to be summed over the ranks.
        """
        tokens, top_k = expert_index.shape
        # Both paths stream the weights once; the fewer experts' worth of bytes wins.
        if tokens * top_k < self.num_local_experts:
            return self.forward_selective(hidden_states, expert_affinities, expert_index)
        if seq_len == 1 or tokens * top_k < self.blockwise_matmul_config.block_size:
            if self.moe_expert_model_parallel_group.size() > 1:
                out: Tensor = self.forward_all_experts_EP(hidden_states, expert_affinities, expert_index)
            else:
                out = self.forward_all_experts(hidden_states, expert_affinities, expert_index)
        else:
            out = self.forward_blockwise(
                hidden_states, expert_affinities, expert_index, expert_affinities_masked_full, padding_mask=padding_mask
            )
        return out

    def forward_selective(self, hidden_states: Tensor, expert_affinities: Tensor, expert_index: Tensor) -> Tensor:
        """Load only chosen experts: T * top_k slots of static shape, of which those of other ranks weigh nothing."""
        tokens, top_k = expert_index.shape
        weights = expert_affinities.gather(1, expert_index)
        if self.moe_expert_model_parallel_group.size() > 1:
            local = self.get_spmd_rank().get_local_expert_indices().view(1, 1, -1).to(expert_index.dtype)
            match = expert_index.unsqueeze(-1) == local  # [T, top_k, E_local]
            places = torch.arange(self.num_local_experts, device=expert_index.device)
            # A slot of another rank's expert falls on local expert 0 and is multiplied by 0.
            slots = torch.where(match, places, torch.zeros_like(places)).sum(dim=-1)
            weights = weights * match.any(dim=-1).to(weights.dtype)
        else:
            slots = expert_index
        repeated = hidden_states.repeat_interleave(top_k, dim=0).unsqueeze(1)  # [T * top_k, 1, H]
        out = self.get_mlp_op()(repeated, expert_indices=slots.flatten()).squeeze(1)
        weighted = out.view(tokens, top_k, -1).to(torch.float32) * weights.unsqueeze(-1)
        result: Tensor = weighted.sum(dim=1).to(hidden_states.dtype)
        return result

    def torch_blockwise_matmul_inference(
        self,
        block_size: int,
        num_blocks: int,
        hidden_states: Tensor,
        expert_affinities_masked: Tensor,
        token_position_to_id: Tensor,
        block_to_expert: Tensor,
        pad_inputs_for_matmul: bool = False,
    ) -> Tensor:
        """Dropless prefill without NKI: blocks of tokens, each of one expert, several blocks an operation.

        Upstream writes one subgraph a block; with 193 blocks a layer that is 12,000 for the compiler to schedule.

        Args:
            hidden_states: [T, H].
            expert_affinities_masked: [T, E_local].
            token_position_to_id: [num_blocks * block_size], token numbers, T or negative for padding.
            block_to_expert: [num_blocks], local expert numbers.

        Returns:
            [T, H].
        """
        tokens, hidden = hidden_states.shape
        # Selected before it is viewed: upstream reduces the map over the ranks in place and as a slice, and a view of
        # that drops the reduction from the lowered graph (torch_xla 2.9): each rank would know its own tokens only.
        places = token_position_to_id.to(torch.long)
        places = torch.where(places < 0, torch.full_like(places, tokens), places).view(num_blocks, block_size)
        # Padding reads and writes one row more than there are tokens.
        padded = torch.nn.functional.pad(hidden_states, (0, 0, 0, 1))
        weights = torch.nn.functional.pad(expert_affinities_masked, (0, 0, 0, 1))
        out = torch.zeros(tokens + 1, hidden, dtype=torch.float32, device=hidden_states.device)
        for first in range(0, num_blocks, BLOCKS_AT_ONCE):
            rows = places[first : first + BLOCKS_AT_ONCE]
            experts = block_to_expert[first : first + BLOCKS_AT_ONCE].to(torch.long)
            part = self.get_mlp_op()(padded[rows], expert_indices=experts)
            part = part.to(torch.float32) * weights[rows, experts.unsqueeze(1)].unsqueeze(-1)
            out = out.index_add(0, rows.flatten(), part.flatten(0, 1))
        return out[:tokens].to(hidden_states.dtype)
