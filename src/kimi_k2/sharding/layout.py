"""How many ranks, for whom, and in which formats: the choices of a conversion.

And tensors of its output with their cuts, as data.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.quantization.stored import TensorSpec, format_of
from kimi_k2.sharding.experts import ExpertFormat, expert_formats

Target = Literal["neuron", "cuda"]
# A decode step on Trainium: PyTorch operations; or one NKI kernel of all MoE layers, collectives inside.
Decode = Literal["xla", "layers"]
AttentionTiles = Literal["", "bf16", "fp8"]
STORED = "stored"  # experts in the checkpoint's own format
# Likewise, but the routed experts' down_proj, INT4 in groups of 32, dequantized to the model's dtype: the second of an
# expert's GEMMs then unpacks nothing, and has four times the bytes.
W2_BF16 = "w2_bf16"
GROUP = 32  # of INT4 that has a kernel for it
SERVED_EXPERTS = "KIMI_K2_EXPERTS"
GLOBAL_LAYER = -1  # embedding, final norm and head


@dataclass(frozen=True)
class Layout:
    """Ranks and formats of a pre-sharded checkpoint.

    Args:
        moe_tp: ranks that share an expert.
        moe_ep: groups that the experts are divided among.
        target: whose names and layouts.
        experts: format of the routed experts, one of `experts.format.expert_formats`; for cuda `bf16`, or `stored`: the
            whole model keeps the checkpoint's, or `w2_bf16`: all but the experts' down_proj.
        dtype: of float weights for neuron and for cuda with `bf16`.
        decode: form of a decode step; neuron only. `layers` has experts in tiles and further weights, `xla` neither.
            None is that of `experts`.
        replicas: copies of all but the routed experts, each cut over as many ranks (data parallelism); cuda only.
        query_group: with `layers`, ranks that share a cache, each of which makes the queries of all their heads: write
            weights for it; 0 without. One head a rank.
    """

    moe_tp: int
    moe_ep: int = 1
    target: Target = "neuron"
    experts: str = "per_channel"
    dtype: torch.dtype = torch.bfloat16
    decode: Decode | None = None
    query_group: int = 0
    replicas: int = 1

    def __post_init__(self) -> None:
        for field in ("moe_tp", "moe_ep"):
            if getattr(self, field) < 1:
                raise ConfigError(f"expected a positive number, got {getattr(self, field)}", field=field)
        if self.ranks % self.replicas or (self.replicas > 1 and self.target != "cuda"):
            raise ConfigError(f"{self.replicas} do not share {self.ranks} ranks of {self.target}", field="replicas")
        allowed = ("bf16", STORED, W2_BF16) if self.target == "cuda" else tuple(expert_formats())
        if self.experts not in allowed:
            raise ConfigError(f"expected {' or '.join(allowed)} for {self.target}, got {self.experts}", field="experts")
        held = expert_formats().get(self.experts)
        in_tiles = held is not None and held.tiles
        if self.decode is None:
            object.__setattr__(self, "decode", "layers" if in_tiles else "xla")
        check_decode(self.decode)
        if in_tiles != self.layers:
            expected = "tiles or bf16_tiles" if self.layers else "no tiles"
            raise ConfigError(f"expected {expected} with decode {self.decode!r}, got {self.experts}", field="experts")
        if self.query_group and (not self.layers or self.query_group % 2):
            expected = "an even number" if self.layers else "0 without decode 'layers'"
            raise ConfigError(f"expected {expected}, got {self.query_group}", field="query_group")

    @property
    def keeps(self) -> bool:
        """Whether weights keep the checkpoint's format, but for what `held` says."""
        return self.experts in (STORED, W2_BF16)

    def held(self, config: KimiK2Config) -> KimiK2Config:
        """The configuration of what ranks hold: with `w2_bf16` the routed experts' down_proj is not quantized.

        Raises:
            ConfigError: with it, the experts are not INT4 in groups of 32.
        """
        scheme = config.quantization
        if self.experts != W2_BF16:
            return config
        if not isinstance(scheme, Int4GroupFormat) or scheme.group_size != GROUP:
            raise ConfigError(f"{W2_BF16}: expected INT4 in groups of {GROUP}", field="quantization_config")
        ignore = *scheme.ignore, r"re:.*\.mlp\.experts\.\d+\.down_proj$"
        return config.model_copy(update={"quantization": scheme.model_copy(update={"ignore": ignore})})

    def expert_format(self, config: KimiK2Config) -> ExpertFormat:
        """The format of the routed experts; neuron only.

        Raises:
            ConfigError: the kernels do not take the sizes of its tiles.
        """
        return expert_formats()[self.experts].for_ranks(config, self.moe_tp, self.ranks)

    @cached_property
    def layers(self) -> bool:
        """Whether a decode step's MoE layers are one kernel: what it reads of attention, router and sums is written."""
        return self.decode == "layers"

    def attention_tiles(self, config: KimiK2Config) -> AttentionTiles:
        """Format of MoE layers' attention in the kernel's tiles (`sharding.attention_tiles`); "" without.

        FP8, of checkpoints that have attention in FP8 blocks, stands beside the ordinary weights, which prefill reads:
        for a long cache, which ranks share, BF16 does not fit.
        """
        if not self.layers:
            return ""
        stored = format_of(config.quantization, "model.layers.0.self_attn.q_b_proj")
        fp8 = self.query_group and self.experts == "tiles" and stored.e4m3_block is not None
        return "fp8" if fp8 else "bf16"

    @cached_property
    def ranks(self) -> int:
        """Number of files."""
        return self.moe_tp * self.moe_ep

    @cached_property
    def dense(self) -> int:
        """Ranks that all but the routed experts is cut over."""
        return self.ranks // self.replicas


def check_decode(decode: str | None) -> None:
    """Refuse a form of decode that there is not.

    Raises:
        ConfigError: `decode` is no `Decode`.
    """
    if decode is not None and decode not in get_args(Decode):
        raise ConfigError(f"expected {' or '.join(get_args(Decode))}, got {decode!r}", field="decode")


def served_experts() -> str:
    """What an engine is asked by KIMI_K2_EXPERTS to hold routed experts in: `stored`, or `w2_bf16`.

    Raises:
        ConfigError: something else.
    """
    asked = os.environ.get(SERVED_EXPERTS, STORED)
    if asked not in (STORED, W2_BF16):
        raise ConfigError(f"expected {STORED} or {W2_BF16}, got {asked!r}", field=SERVED_EXPERTS)
    return asked


def engine_serves(reason: str) -> None:
    """An engine's own model is to serve; it holds experts as they are stored.

    Raises:
        ConfigError: another form of experts is asked for.
    """
    if served_experts() != STORED:
        raise ConfigError(f"{served_experts()}, but the engine's own model is to serve: {reason}", field=SERVED_EXPERTS)


Region = tuple[slice, ...]


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the output and how it is cut.

    Attributes:
        name, dtype, shape: of the whole tensor, before it is cut.
        layer: decoder layer, or GLOBAL_LAYER.
        dim: dimension cut over `parts` ranks; None if it is not.
        stride: equal sections of `dim`, each of which is cut (2 for gate and up side by side).
        parts: ranks that share a copy.
        expert_groups: groups that dimension 0 is divided among.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layer: int
    dim: int | None = None
    stride: int = 1
    parts: int = 1
    expert_groups: int = 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on each rank."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] //= self.parts
        if self.expert_groups > 1:
            shape[0] //= self.expert_groups
        return tuple(shape)

    @property
    def kind(self) -> str:
        """In words, for a table."""
        words = [] if self.dim is None else [f"dim {self.dim} / {self.parts}"]
        if self.stride > 1:
            words.append(f"stride {self.stride}")
        if self.expert_groups > 1:
            words.append(f"experts / {self.expert_groups}")
        return ", ".join(words) or "replicated"

    def spec(self) -> TensorSpec:
        """Name, dtype and shape in a rank's file."""
        return TensorSpec(self.name, self.dtype, self.local_shape)

    def experts_of(self, rank: int) -> range:
        """Rows of dimension 0 on `rank` if experts are divided; all of them otherwise."""
        count = self.shape[0] // self.expert_groups
        first = rank // self.parts % self.expert_groups * count
        return range(first, first + count)

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's slice of the whole tensor, contiguous; of some of its rows where these are not cut."""
        pieces = [whole[region] for region in self.regions(rank)]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, self.dim or 0)

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Of one expert by rank: [1, ...] where the ranks that share it all hold the same, else [parts, ...]."""
        return (1 if self.dim is None else self.parts, *self.local_shape[1:])

    def by_rank(self, expert: Tensor) -> Tensor:
        """One expert's whole tensor to `expert_shape`, contiguous: what each rank of those that share it holds."""
        if self.dim is None:
            return expert.contiguous().unsqueeze(0)
        dim = self.dim - 1
        cut = expert.unflatten(dim, (self.stride, self.parts, -1)).movedim(dim + 1, 0)
        out: Tensor = cut.contiguous().flatten(dim + 1, dim + 2)
        return out

    def regions(self, rank: int) -> list[Region]:
        """Boxes of the whole tensor that `rank` holds; concatenated along `dim` they are its local tensor."""
        whole = [slice(0, size) for size in self.shape]
        if self.expert_groups > 1:
            experts = self.experts_of(rank)
            whole[0] = slice(experts.start, experts.stop)
        if self.dim is None:
            return [tuple(whole)]
        section = self.shape[self.dim] // self.stride
        width = section // self.parts
        starts = (number * section + rank % self.parts * width for number in range(self.stride))
        return [(*whole[: self.dim], slice(start, start + width), *whole[self.dim + 1 :]) for start in starts]


@dataclass(frozen=True)
class ShardingPlan:
    """All tensors of all ranks, in file order."""

    config: KimiK2Config
    layout: Layout
    tensors: tuple[PlannedTensor, ...]

    def layer(self, layer: int) -> list[PlannedTensor]:
        """Tensors of one layer."""
        return [tensor for tensor in self.tensors if tensor.layer == layer]

    def of_layers(self, layers: range | None) -> list[PlannedTensor]:
        """Tensors of some layers, None for all, and those of no layer."""
        return [
            tensor
            for tensor in self.tensors
            if layers is None or tensor.layer == GLOBAL_LAYER or tensor.layer in layers
        ]
