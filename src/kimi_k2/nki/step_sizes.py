"""A MoE layer on one rank of 64, as the kernels of whole layers take it: shapes, dtypes, and values to run with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config

HIDDEN, RANKS, TOP_K = 7168, 64, 8
BF16, FP8, F32 = torch.bfloat16, torch.float8_e4m3fn, torch.float32
Sizes = dict[str, tuple[tuple[int, ...], torch.dtype]]
# Standard deviations of drawn values, by which no sum is far larger than another; of others 1.
_DEVIATIONS = {
    "q_b": 1536**-0.5, "w_uk": 0.1, "w_uv": 0.05, "o_proj": 0.05, "early_residual": 0.02, "early_heads": 0.02,
    "bias": 0.1, "next_residual": 0.02, "next_experts": 0.05, "next_shared": 0.05,
}  # fmt: skip


@dataclass(frozen=True)
class Form:
    """What a step's kernels take.

    Attributes:
        attention: dtype of its weights.
        tokens: of the sequence: one, or drafts to be verified with it.
        apart: a call for each layer, over a cache in pages.
    """

    attention: torch.dtype = BF16
    tokens: int = 1
    apart: bool = False


@dataclass(frozen=True)
class ExpertShape:
    """A preset's experts on a rank.

    Attributes:
        width: of one.
        local: of each token's 8 experts, how many the rank holds.
        others: whether other ranks hold some.
    """

    width: int
    local: tuple[int, ...]
    others: bool

    @property
    def count(self) -> int:
        """Experts that the rank is given."""
        return max(self.local) if self.others else TOP_K

    def hidden(self) -> Tensor:
        """Residuals by which each token has logits of its own, float32 [T, H]."""
        return torch.eye(len(self.local), HIDDEN)

    def early_residual(self, experts: int) -> Tensor:
        """The router's weights of the residual's columns, by which tokens choose so, float32 [H / RANKS, E]."""
        weights = torch.zeros(HIDDEN // RANKS, experts)
        largest = torch.arange(TOP_K, 0, -1) / 200  # the norm makes it 85 times as much
        for row, local in zip(weights, self.local, strict=False):
            row[[*range(local), *range(self.count, self.count + TOP_K - local)]] = largest
        return weights


def layer(
    config: KimiK2Config, width: int, count: int, slots: int, group: int = 1, attention: torch.dtype = BF16
) -> Sizes:
    """Shape and dtype of a layer's tensors on a rank, by `layer_attention.FIELDS`.

    Args:
        config: of the model, with a head a rank.
        width: columns of an expert.
        count: experts that the rank is given.
        slots: of the cache of one sequence on this rank.
        group: ranks that share a cache, each of which makes the queries of all their heads, one half on each core.
        attention: dtype of its weights; FP8 ones have scales.
    """
    q_rank, rank, rope, nope = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
    hidden, experts, downs = config.hidden_size, config.n_routed_experts, config.qkv_a_dim
    blocks, own, shared = hidden // 128, hidden // RANKS, config.moe_intermediate_size // RANKS
    heads, cores = (1, ()) if group == 1 else (group // 2, (2,))
    sizes: Sizes = {
        "q_norm": ((q_rank,), BF16), "kv_norm": ((rank,), BF16),
        "q_b": ((*cores, 128, q_rank // 128, heads * (nope + rope)), attention),
        "w_uk": ((*cores, heads, nope, 1, rank), attention), "w_uv": ((1, 128, rank // 128, nope), attention),
        "o_proj": ((nope, 1, hidden), attention), "early_residual": ((own, experts), F32),
        "early_heads": ((nope, experts), F32), "latents": ((1, slots, rank), BF16), "keys": ((1, slots, rope), BF16),
        "norm": ((hidden,), BF16), "bias": ((1, experts), F32),
        "gate_up": ((count, 128, blocks, 2 * width), FP8), "gate_up_scales": ((count, 2, blocks), F32),
        "down": ((count, width, hidden), FP8), "down_scales": ((count, blocks), F32),
        "shared_gate_up": ((128, blocks, 2 * shared), FP8), "shared_gate_up_scales": ((2, blocks), F32),
        "shared_down": ((shared, hidden), FP8), "shared_down_scales": ((blocks,), F32),
        "next_residual": ((own, downs), BF16), "next_experts": ((count, width, downs), BF16),
        "next_shared": ((shared, downs), BF16),
    }  # fmt: skip
    if attention == FP8:
        sizes |= {
            "q_b_scales": ((*cores, 128, heads - (-heads * rope // 128), q_rank // 128), F32),
            "w_uk_scales": ((*cores, heads, 128, rank // 128, 1), F32),
            "w_uv_scales": ((1, 128, 1, rank // 128), F32), "o_scales": ((128, blocks, 1), F32),
        }  # fmt: skip
    return sizes


def drawn(sizes: Sizes, generator: torch.Generator) -> dict[str, Tensor]:
    """Values of such tensors: FP8 within 240 with scales to match, norms about 1, all else about 0."""
    tensors = {}
    for name, (shape, dtype) in sizes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("_scales"):
            values = values.abs().clamp(max=4) * 3e-4 + 1e-5
        elif dtype == FP8:
            values = (values * 40).clamp(-224, 224)
        else:
            values = values * 0.1 + 1 if name.endswith("norm") else values * _DEVIATIONS.get(name, 1.0)
        tensors[name] = values.to(dtype)
    return tensors
