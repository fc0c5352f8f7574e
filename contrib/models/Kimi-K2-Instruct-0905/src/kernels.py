"""Operations of the decode step as NKI kernels: the vendor's `nki` on a device, its emulator in CPU mode."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.nki import install

MOST_TOKENS = 128


class RouterKernel:
    """`kimi_k2.nki.kernels.router` with KimiK2Router's results.

    Args:
        cores: 1 or 2 (LNC).
    """

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self.emulated = install()

    def takes(self, hidden_states: Tensor) -> bool:
        """Whether the kernel routes these [B, S, H]: few enough tokens, and a device on which `nki` runs."""
        tokens, size = hidden_states.shape[:-1].numel(), hidden_states.shape[-1]
        here = hidden_states.device.type == "cpu" if self.emulated else hidden_states.device.type != "cpu"
        return here and tokens <= MOST_TOKENS and size % (128 * self.cores) == 0

    def __call__(
        self,
        tokens: Tensor,
        weight: Tensor,
        e_score_correction_bias: Tensor,
        top_k: int,
        norm_topk_prob: bool,
        routed_scaling_factor: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits float32 [T, E], affinities float32 [T, E], expert numbers int64 [T, top_k].

        Args:
            tokens: [T, H].
            weight: [E, H]; the kernel reads it transposed.
        """
        from kimi_k2.nki.kernels.router import noaux_tc_router

        results = noaux_tc_router[self.cores](
            tokens,
            weight.to(tokens.dtype).T.contiguous(),
            e_score_correction_bias.unsqueeze(0),
            routed_scaling_factor,
            norm_topk_prob,
            top_k,
            return_logits=True,
        )
        index, _, affinities, logits = (torch.as_tensor(part, device=tokens.device) for part in results)
        return logits, affinities, index.to(torch.long)
