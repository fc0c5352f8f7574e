"""Experts that vLLM moves between ranks to even their load (`--enable-eplb`), some of which are held twice.

vLLM counts the tokens of every expert held, decides which rank is to hold which, moves their rows and keeps the maps. A
layer here gives it the rows, and asks it where the experts chosen for a token are held, by number over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from kimi_k2.model.moe import Experts
from kimi_k2.serving.vllm.adapter import BaseRouter, EplbLayerState, RoutingMethodType
from kimi_k2.serving.vllm.step import rows_of_experts


class Placed(BaseRouter):  # type: ignore[misc]  # vLLM has no types for mypy here
    """Where the experts of one layer are held; what vLLM calls an MoE layer.

    Args:
        experts: of the layer, as many as this rank holds.
        routed: experts of the model.
        top_k: chosen for a token.
    """

    eplb_state: EplbLayerState

    def __init__(self, experts: Experts, routed: int, top_k: int) -> None:
        super().__init__(top_k, experts.total_experts, EplbLayerState())
        self.experts, self.routed = experts, routed

    @property
    def routing_method_type(self) -> RoutingMethodType:
        """Unused: experts are chosen by our router."""
        return RoutingMethodType.Unspecified

    def _compute_routing(self, *args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("experts are chosen by our router")

    def set_eplb_state(self, moe_layer_idx: int, *maps: Tensor, **named: Tensor) -> None:
        """Take the views of vLLM's maps and counts that are this layer's."""
        self.eplb_state.set_layer_state(moe_layer_idx, *maps, **named)

    def get_expert_weights(self) -> list[Tensor]:
        """Of each tensor a row an expert held, as the kernels have it: every expert's order is its own."""
        return [tensor.view(len(tensor), -1) for tensor in self.experts.buffers()]

    def __call__(self, indices: Tensor) -> Tensor:
        """Of experts chosen [T, k] the numbers of one that is held; vLLM counts them."""
        placed: Tensor = self._apply_eplb_mapping(indices)
        return placed

    def held(self) -> Sequence[int]:
        """The experts in this rank's rows, as vLLM first places them and after it has moved them."""
        first, count, placed = self.experts.first_expert, self.experts.num_experts, rows_of_experts(self.eplb_state)
        if placed is None:
            return [number % self.routed for number in range(first, first + count)]
        experts = [-1] * self.experts.total_experts
        for expert, rows in enumerate(placed):
            for row in rows:
                if row >= 0:
                    experts[row] = expert
        return experts[first : first + count]
