"""How many ranks, for whom, and in which formats: the choices of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from kimi_k2.errors import ConfigError
from kimi_k2.sharding.experts.format import expert_formats

Target = Literal["neuron", "cuda"]
AttentionTiles = Literal["", "bf16", "fp8"]
STORED = "stored"  # experts in the checkpoint's own format
GLOBAL_LAYER = -1  # embedding, final norm and head


@dataclass(frozen=True)
class Layout:
    """Ranks and formats of a pre-sharded checkpoint.

    Args:
        moe_tp: ranks that share an expert.
        moe_ep: groups that the experts are divided among.
        target: whose names and layouts.
        experts: format of the routed experts, one of `experts.format.expert_formats`; for cuda `bf16`, or `stored`: the
            whole model keeps the checkpoint's.
        dtype: of float weights for neuron and for cuda with `bf16`.
        spmd_rank: write the rank numbers that NxD's expert MLPs hold; None for when they do by default (EP above 1).
        early_router: write the weights of the early router too (`sharding.early_router`); neuron only.
        early_qkv_a: write the weights of early down projections too (`sharding.early_qkv_a`); neuron only, experts in
            tiles.
        attention_tiles: write attention's weights in the decode kernel's tiles, in this format; "fp8" beside the
            ordinary ones (`sharding.attention_tiles`); neuron only.
        query_group: ranks that share a cache, each of which makes the queries of all their heads in the kernel of whole
            layers: write weights for it; 0 without. One head a rank; needs attention_tiles.
    """

    moe_tp: int
    moe_ep: int = 1
    target: Target = "neuron"
    experts: str = "per_channel"
    dtype: torch.dtype = torch.bfloat16
    spmd_rank: bool | None = None
    early_router: bool = False
    early_qkv_a: bool = False
    attention_tiles: AttentionTiles = ""
    query_group: int = 0

    def __post_init__(self) -> None:
        for field in ("moe_tp", "moe_ep"):
            if getattr(self, field) < 1:
                raise ConfigError(f"expected a positive number, got {getattr(self, field)}", field=field)
        allowed = ("bf16", STORED) if self.target == "cuda" else tuple(expert_formats())
        if self.experts not in allowed:
            raise ConfigError(f"expected {' or '.join(allowed)} for {self.target}, got {self.experts}", field="experts")
        for field in ("early_router", "early_qkv_a", "attention_tiles"):
            if (given := getattr(self, field)) and self.target != "neuron":
                raise ConfigError(f"expected {type(given)()!r} for {self.target}, got {given!r}", field=field)
        if self.query_group and (not self.attention_tiles or self.query_group % 2):
            expected = "0 without attention_tiles" if not self.attention_tiles else "an even number"
            raise ConfigError(f"expected {expected}, got {self.query_group}", field="query_group")
        if self.attention_tiles not in get_args(AttentionTiles):
            expected = " or ".join(map(repr, get_args(AttentionTiles)))
            raise ConfigError(f"expected {expected}, got {self.attention_tiles!r}", field="attention_tiles")

    @property
    def ranks(self) -> int:
        """Number of files."""
        return self.moe_tp * self.moe_ep

    @property
    def has_spmd_rank(self) -> bool:
        """Whether expert MLPs hold their rank."""
        return self.target == "neuron" and (self.moe_ep > 1 if self.spmd_rank is None else self.spmd_rank)
