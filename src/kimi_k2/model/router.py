"""The router's module: gate weight, bias and options."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k2.config import KimiK2Config
from kimi_k2.ops.router import GateOptions, route, router_logits


class Router(nn.Module):
    """Router of one layer: float32 logits from the gate weight, then `noaux_tc_gate`.

    `weight` [E, H] may be BF16; `e_score_correction_bias` [E] stays float32 whatever the model's dtype, since rounding
    it to BF16 changes nearly every choice.
    """

    e_score_correction_bias: Tensor

    def __init__(self, config: KimiK2Config, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        shape = (config.n_routed_experts, config.hidden_size)
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
        bias = torch.empty(config.n_routed_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)
        self.top_k = config.num_experts_per_tok
        # Keyword arguments of `ops.router.noaux_tc_gate`.
        self.options: GateOptions = {
            "n_group": config.n_group,
            "topk_group": config.topk_group,
            "norm_topk_prob": config.norm_topk_prob,
            "routed_scaling_factor": config.routed_scaling_factor,
        }

    def logits(self, x: Tensor) -> Tensor:
        """[T, H] to float32 [T, E] (float64 for float64 input)."""
        return router_logits(x, self.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] to (topk_indices int64 [T, k], topk_weights [T, k])."""
        return route(x, self.weight, self.e_score_correction_bias, self.top_k, **self.options)
