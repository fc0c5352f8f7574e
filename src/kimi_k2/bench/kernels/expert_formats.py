"""Routed experts of each stored format with random weights: our operation, and what it should compute, in float64."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_k2.bench.kernels import moe, w4a16
from kimi_k2.bench.kernels.moe import HIDDEN
from kimi_k2.kernels.experts import fp8_decode
from kimi_k2.kernels.experts.bf16 import moe_bf16
from kimi_k2.kernels.experts.fp8 import BLOCK, moe_fp8
from kimi_k2.kernels.experts.w4a16 import moe_w4a16
from kimi_k2.kernels.experts.w4a16_layout import GROUP, PreparedW4A16, restore_w4a16
from kimi_k2.quantization.int4_group import dequantize_int4_group

# FP8 experts that differ; the others repeat them, as drawing 17 GB of a layer at TP1 takes seconds.
DIFFERENT = 7

# x [T, H], indices [T, k], weights [T, k] to [T, H].
Operation = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class RandomExperts(ABC):
    """Experts of a rank, [E, 2I, H] and [E, H, I], stored in one format.

    Attributes:
        weights: and their scales, in the order that our operation takes them.
    """

    name: ClassVar[str]
    weights: Sequence[Tensor | None]

    @classmethod
    @abstractmethod
    def draw(cls, experts: int, inter: int) -> Self:
        """Weights of deviation about 0.02 on the GPU."""

    @abstractmethod
    def ours(self, tokens: int, top_k: int) -> Operation:
        """The operation that the model would take for so many tokens."""

    @abstractmethod
    def dequantized(self, expert: int) -> tuple[Tensor, Tensor]:
        """float64 gate_up_proj [2I, H] and down_proj [H, I] of one expert."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(experts, intermediate size)."""

    @property
    def bytes_each(self) -> float:
        """Bytes of one expert's weights and scales."""
        return sum(part[0].numel() * part.element_size() for part in self.weights if part is not None)

    def reference(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """float64 [T, H] of a few tokens."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for token in range(x.shape[0]):
            for expert, weight in zip(indices[token].tolist(), weights[token].double(), strict=True):
                gate_up, down = self.dequantized(expert)
                gate, up = (gate_up @ x[token].double()).chunk(2)
                out[token] += weight * (down @ (silu(gate) * up))
        return out


@dataclass(frozen=True)
class Fp8Experts(RandomExperts):
    """e4m3 with a scale a block of 128x128."""

    name: ClassVar[str] = "FP8"
    weights: tuple[Tensor, Tensor, Tensor, Tensor]

    @classmethod
    def draw(cls, experts: int, inter: int) -> Self:
        """See RandomExperts."""
        few = moe.random_experts(min(experts, DIFFERENT), inter, HIDDEN)
        first, first_scale, second, second_scale = (
            part.repeat(-(-experts // part.shape[0]), 1, 1)[:experts] for part in few
        )
        return cls((first, first_scale, second, second_scale))

    def ours(self, tokens: int, top_k: int) -> Operation:
        """See RandomExperts."""
        _, hidden, inter = self.weights[2].shape
        few = fp8_decode.supports(tokens, top_k, hidden, inter, self.weights[0].device)
        operation: Callable[..., Tensor] = fp8_decode.moe_decode if few else moe_fp8
        return lambda x, indices, weights: operation(x, *self.weights, indices, weights)

    def dequantized(self, expert: int) -> tuple[Tensor, Tensor]:
        """See RandomExperts."""

        def whole(weight: Tensor, scale: Tensor) -> Tensor:
            wide = scale[expert].double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            return weight[expert].double() * wide

        gate_up, gate_up_scale, down, down_scale = self.weights
        return whole(gate_up, gate_up_scale), whole(down, down_scale)

    @property
    def shape(self) -> tuple[int, int]:
        """See RandomExperts."""
        return self.weights[2].shape[0], self.weights[2].shape[2]


@dataclass(frozen=True)
class Int4Experts(RandomExperts):
    """Symmetric INT4 in groups of 32, in our kernel's order."""

    name: ClassVar[str] = "INT4"
    weights: PreparedW4A16

    @classmethod
    def draw(cls, experts: int, inter: int) -> Self:
        """See RandomExperts."""
        return cls(w4a16.random_experts(experts, inter, HIDDEN))

    def ours(self, tokens: int, top_k: int) -> Operation:
        """See RandomExperts."""
        return lambda x, indices, weights: moe_w4a16(x, *self.weights, indices, weights)

    def checkpoint(self, experts: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Some experts' packed weights and scales as a checkpoint holds them."""
        packed, scale, down, down_scale = self.weights
        assert down_scale is not None
        return restore_w4a16(PreparedW4A16(packed[experts], scale[experts], down[experts], down_scale[experts]))

    def dequantized(self, expert: int) -> tuple[Tensor, Tensor]:
        """See RandomExperts."""
        packed, scale, down, down_scale = (part[0] for part in self.checkpoint(slice(expert, expert + 1)))
        sizes = (packed.shape[0], packed.shape[1] * 8), (down.shape[0], down.shape[1] * 8)
        return (
            dequantize_int4_group(packed, scale, sizes[0], GROUP, torch.float32).double(),
            dequantize_int4_group(down, down_scale, sizes[1], GROUP, torch.float32).double(),
        )

    @property
    def shape(self) -> tuple[int, int]:
        """See RandomExperts."""
        return self.weights.gate_up_proj_packed.shape[0], self.weights.gate_up_proj_packed.shape[1] // 2


@dataclass(frozen=True)
class Bf16Experts(RandomExperts):
    """Not quantized."""

    name: ClassVar[str] = "BF16"
    weights: tuple[Tensor, Tensor]

    @classmethod
    def draw(cls, experts: int, inter: int) -> Self:
        """See RandomExperts."""
        sizes = (experts, 2 * inter, HIDDEN), (experts, HIDDEN, inter)
        first, second = (torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(std=0.02) for size in sizes)
        return cls((first, second))

    def ours(self, tokens: int, top_k: int) -> Operation:
        """See RandomExperts."""
        return lambda x, indices, weights: moe_bf16(x, *self.weights, indices, weights)

    def dequantized(self, expert: int) -> tuple[Tensor, Tensor]:
        """See RandomExperts."""
        return self.weights[0][expert].double(), self.weights[1][expert].double()

    @property
    def shape(self) -> tuple[int, int]:
        """See RandomExperts."""
        return self.weights[1].shape[0], self.weights[1].shape[2]


FORMATS: dict[str, type[RandomExperts]] = {kind.name: kind for kind in (Fp8Experts, Int4Experts, Bf16Experts)}
