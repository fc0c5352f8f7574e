"""Routed experts on NxD: ExpertMLPsV2 that also loads selectively under expert parallelism, and never drops a token."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.modules.moe.expert_mlps_v2 import ExpertMLPsV2
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size
from torch import Tensor

from .tiles import BlockExperts, TiledExperts


class KimiK2ExpertMLPs(ExpertMLPsV2):
    """ExpertMLPsV2 whose choice of path is right under expert parallelism (EP).

    Upstream refuses selective loading with EP at decode and, for short prompts, indexes the local weights with global
    expert numbers. Here every path knows which experts the rank holds. The router's weights are final, so nothing is
    normalised again. Reduction over ranks is left to the MoE module: one all-reduce for all paths.

    Args:
        tiles: dtype of weights that are held in the NKI kernel's tiles; None for NxD's own arrangement.
        block: rows and columns of FP8 blocks, in NxD's own arrangement; 0 where the experts have none.
        shared_width: this rank's columns of the shared expert, which is then held in tiles and computed here; 0 where
            the MoE module has it.
        shared_tiles: dtype of those tiles.
        rows_at_once: tokens of all blocks of a group at prefill, at most: 16,384 have 235 MB of BF16 outputs. Each
            group's outputs are read once for every choice of every token, so larger groups move fewer bytes, and hold
            more.
        early: columns and dtype of the next layer's down projections that are held beside tiles; None without.
    """

    def __init__(
        self,
        *,
        tiles: torch.dtype | None = None,
        block: int = 0,
        shared_width: int = 0,
        shared_tiles: torch.dtype | None = None,
        rows_at_once: int = 16384,
        early: tuple[int, torch.dtype] | None = None,
        **kwargs: Any,
    ) -> None:
        self.tiles, self.block, self.early = tiles, block, early  # before the base makes the weights
        super().__init__(**kwargs)
        self.rows_at_once = rows_at_once
        self.shared_experts: TiledExperts | None = None
        if shared_tiles is not None and shared_width:
            ranks, hidden = get_tensor_model_parallel_size(), self.routed_experts_mlp_config.hidden_size
            self.shared_experts = TiledExperts(1, hidden, shared_width, shared_tiles, ranks, 1, early)

    def initialize_mlp_op(
        self, tensor_model_parallel_group: Any, expert_model_parallel_group: Any, is_prefill: bool
    ) -> Any:
        """NxD's Experts, or the same on FP8 blocks or tiles."""
        if self.tiles is None and not self.block:
            return super().initialize_mlp_op(tensor_model_parallel_group, expert_model_parallel_group, is_prefill)
        config, tp, ep = self.routed_experts_mlp_config, tensor_model_parallel_group, expert_model_parallel_group
        local, width = config.num_experts // ep.size(), config.intermediate_size // tp.size()
        if self.tiles is None:
            return BlockExperts(local, config.hidden_size, width, self.block, tp.size(), ep.size())
        return TiledExperts(local, config.hidden_size, width, self.tiles, tp.size(), ep.size(), self.early)

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
            return self._with_shared(
                self.forward_selective(hidden_states, expert_affinities, expert_index), hidden_states
            )
        if seq_len == 1 or tokens * top_k < self.blockwise_matmul_config.block_size:
            if self.moe_expert_model_parallel_group.size() > 1:
                out = self.forward_all_experts_EP(hidden_states, expert_affinities, expert_index)
            else:
                out = self.forward_all_experts(hidden_states, expert_affinities, expert_index)
        else:
            self._chosen = self.local_slots(expert_affinities, expert_index)
            out = self.forward_blockwise(
                hidden_states, expert_affinities, expert_index, expert_affinities_masked_full, padding_mask=padding_mask
            )
            del self._chosen
        return self._with_shared(out, hidden_states)

    def _with_shared(self, out: Tensor, hidden_states: Tensor) -> Tensor:
        """The routed experts' [T, H] and the shared one's, where it is held here."""
        if self.shared_experts is None:
            return out
        shared: Tensor = self.shared_experts(hidden_states.unsqueeze(0)).squeeze(0)
        return out + shared

    def _selective(self, expert_index: Tensor) -> bool:
        """Whether so many choices read fewer experts than this rank holds."""
        return expert_index.numel() < self.num_local_experts

    def local_affinities(self, expert_affinities: Tensor) -> Tensor:
        """Of [T, E] the columns of this rank's experts."""
        if self.moe_expert_model_parallel_group.size() == 1:
            return expert_affinities
        local = self.get_spmd_rank().get_local_expert_indices().view(-1)
        return expert_affinities.index_select(1, local.to(torch.long))

    def local_slots(self, expert_affinities: Tensor, expert_index: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's choices as this rank's expert numbers, int64 [T, top_k], and their weights.

        A choice of another rank's expert becomes local expert 0 with a weight of 0.
        """
        weights = expert_affinities.gather(1, expert_index)
        if self.moe_expert_model_parallel_group.size() == 1:
            return expert_index, weights
        local = self.get_spmd_rank().get_local_expert_indices().view(1, 1, -1).to(expert_index.dtype)
        match = expert_index.unsqueeze(-1) == local  # [T, top_k, E_local]
        places = torch.arange(self.num_local_experts, device=expert_index.device)
        slots = torch.where(match, places, torch.zeros_like(places)).sum(dim=-1)
        return slots, weights * match.any(dim=-1).to(weights.dtype)

    def forward_selective(self, hidden_states: Tensor, expert_affinities: Tensor, expert_index: Tensor) -> Tensor:
        """Load only chosen experts: T * top_k slots of static shape, of which those of other ranks weigh nothing."""
        tokens, top_k = expert_index.shape
        slots, weights = self.local_slots(expert_affinities, expert_index)
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
        """Dropless prefill without NKI: blocks of tokens, each of one expert, many blocks an operation.

        Upstream writes one subgraph a block; with 193 blocks a layer that is 12,000 for the compiler to schedule. And
        it adds each block's rows to its tokens' (index_add), which reads and writes every row of every block, most of
        them padding. Here each token fetches its choices' rows and sums them in float32 in the order of its choices,
        group by group.

        Args:
            hidden_states: [T, H].
            expert_affinities_masked: [T, E_local].
            token_position_to_id: [num_blocks * block_size], token numbers, T or negative for padding.
            block_to_expert: [num_blocks], local expert numbers.

        Returns:
            [T, H].
        """
        tokens, hidden = hidden_states.shape
        slots, weights = self._chosen
        if len(slots) != tokens:
            raise ValueError(f"expected the choices of {tokens} tokens, got those of {len(slots)}")
        # Selected before it is viewed: upstream reduces the map over the ranks in place and as a slice, and a view of
        # that drops the reduction from the lowered graph (torch_xla 2.9): each rank would know its own tokens only.
        places = token_position_to_id.to(torch.long)
        places = torch.where(places < 0, torch.full_like(places, tokens), places)
        at = self.rows_of_choices(places, block_to_expert, slots)
        places = places.view(num_blocks, block_size)
        padded = torch.nn.functional.pad(hidden_states, (0, 0, 0, 1))  # padding reads a row of zeros
        out = torch.zeros(tokens, hidden, dtype=torch.float32, device=hidden_states.device)
        most = max(self.rows_at_once // block_size, 1)
        at_once = -(-num_blocks // -(-num_blocks // most))  # groups of one size hold the least
        for first in range(0, num_blocks, at_once):
            group = places[first : first + at_once]
            experts = block_to_expert[first : first + at_once].to(torch.long)
            part = self.get_mlp_op()(padded[group], expert_indices=experts).flatten(0, 1)
            rows = at - first * block_size
            inside = (rows >= 0) & (rows < len(part))
            rows = torch.where(inside, rows, torch.zeros_like(rows))
            for choice in range(slots.shape[1]):
                weighted = part[rows[:, choice]].to(torch.float32) * weights[:, choice, None]
                # Not multiplied by 0: the row of another token may hold what is not finite.
                out = torch.where(inside[:, choice, None], out + weighted, out)
        return out.to(hidden_states.dtype)

    def rows_of_choices(self, places: Tensor, block_to_expert: Tensor, slots: Tensor) -> Tensor:
        """Row of the blocks that holds each token's output for each of its choices.

        Args:
            places: int64 [rows], each row's token, T for padding.
            block_to_expert: [num_blocks], local expert numbers.
            slots: int64 [T, top_k], local expert numbers.

        Returns:
            int64 [T, top_k]; negative for a choice that no block of this rank holds.
        """
        tokens, experts = len(slots), self.num_local_experts
        of_row = block_to_expert.to(torch.long).repeat_interleave(len(places) // len(block_to_expert))
        table = torch.full(((tokens + 1) * experts,), -1, dtype=torch.long, device=places.device)
        table = table.scatter(0, places * experts + of_row, torch.arange(len(places), device=places.device))
        return table.view(tokens + 1, experts)[:tokens].gather(1, slots)
