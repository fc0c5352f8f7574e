"""The noaux_tc router on NxD: RouterTopK with its own float32 correction bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from neuronx_distributed.modules.moe.routing import RouterTopK
from torch import Tensor, nn

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.ops.experts import NORM_GUARD

from .products import dot_float32


class KimiK2Router(RouterTopK):
    """Selects by sigmoid(logits) + bias, weighs by sigmoid(logits); see `kimi_k2.ops.experts` for the definition.

    NxD's own routers cannot: RouterTopK has no bias of this kind, GroupLimitedRouter rounds the scores to the hidden
    dtype before it selects. Everything is float32 here, as in the model's own definition; NxD's routers say float64,
    which the device has not, against a mapping of float32 to BF16 (XLA_DOWNCAST_BF16) that SDK 2.23 began to take away.

    Args:
        config: the validated Hugging Face configuration.
        bias_before_sigmoid: the published port's mistake, for measuring it only.

    Raises:
        ConfigError: `n_group` is not 1 (no member of the family groups its experts).
    """

    def __init__(
        self,
        config: KimiK2Config,
        *,
        bias_before_sigmoid: bool = False,
        **kwargs: Any,
    ) -> None:
        if config.n_group != 1:
            raise ConfigError(f"expected 1, got {config.n_group}", field="n_group")
        super().__init__(
            num_experts=config.n_routed_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            act_fn="sigmoid",
            **kwargs,
        )
        self.norm_topk_prob = config.norm_topk_prob
        self.routed_scaling_factor = config.routed_scaling_factor
        self.bias_before_sigmoid = bias_before_sigmoid
        # Not zeros: a constant would be folded into the graph, and the loaded values would have no effect.
        bias = torch.linspace(-1.0, 1.0, config.n_routed_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias, requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KimiK2Router:
        """Move with the model, but keep the bias float32: rounding it would change nearly every selection."""
        kept = self.e_score_correction_bias.detach().clone()
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        moved.data = kept.to(moved.device)
        return self

    def get_router_logits(self, hidden_states: Tensor) -> Tensor:
        """[B, S, H] to float32 logits [T, E]."""
        tokens = hidden_states.reshape(-1, self.hidden_size)
        return dot_float32(tokens, self.linear_router.weight, ([1], [1]), ([], []))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Route.

        Args:
            hidden_states: [B, S, H] (or [S, B, H]).

        Returns:
            router_logits float32 [T, E]; expert_affinities float32 [T, E], the final weights at the chosen experts and
            0 elsewhere; expert_index int64 [T, top_k].
        """
        router_logits = self.get_router_logits(hidden_states)
        bias = self.e_score_correction_bias
        scores = torch.sigmoid(router_logits + bias if self.bias_before_sigmoid else router_logits)
        choice = scores if self.bias_before_sigmoid else scores + bias
        expert_index = torch.topk(choice, self.top_k, dim=1).indices.detach().to(torch.long)
        weights = scores.gather(1, expert_index)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(dim=1, keepdim=True) + NORM_GUARD)
        weights = weights * self.routed_scaling_factor
        affinities = torch.zeros_like(scores)
        return router_logits, affinities.scatter(1, expert_index, weights), expert_index
