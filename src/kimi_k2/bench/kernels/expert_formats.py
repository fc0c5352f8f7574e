"""Routed experts with random weights, and inputs for them: our operation, and in float64 what it should compute."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_k2.bench.kernels.routing import Routing
from kimi_k2.kernels.experts.entries import W4A16_ORDERS, four_bit_tensors, fp8_tensors
from kimi_k2.kernels.experts.fp8 import BLOCK, moe_fp8
from kimi_k2.kernels.experts.tuning import ExpertChoice
from kimi_k2.kernels.experts.w4a16 import moe_w4a16
from kimi_k2.kernels.experts.w4a16_layout import FORMATS as W4A16_FORMATS
from kimi_k2.kernels.experts.w4a16_layout import FourBits
from kimi_k2.ops.experts import ExpertWeights, routed_experts
from kimi_k2.ops.linear import Weight, dequantize
from kimi_k2.quantization.fp8_block import Fp8BlockFormat
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.quantization.mxfp4 import CompressedMxfp4Format
from kimi_k2.quantization.nvfp4 import Nvfp4Format

HIDDEN = 7168
# FP8 experts that differ; the others repeat them, as drawing 17 GB of a layer at TP1 takes seconds.
DIFFERENT = 7
MOVED = 4e8  # bytes that a case's inputs read together at least, or as many sets as there are: several times the L2

_SCHEMES = (
    Int4GroupFormat(), CompressedMxfp4Format(), Nvfp4Format(), Int4GroupFormat(group_size=64),
    Int4GroupFormat(group_size=128),
)  # fmt: skip
_NAMES = ("INT4", "MXFP4", "NVFP4", "INT4-64", "INT4-128")
FOUR_BITS = dict(zip(_NAMES, zip(W4A16_FORMATS, _SCHEMES, strict=True), strict=True))
FORMATS = ("FP8", "BF16", *FOUR_BITS)
# x [T, H], indices [T, k], weights [T, k] to [T, H].
Operation = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """A rank's shape: its experts, their intermediate size, and the pairs that arrive for each token."""

    experts: int
    inter: int
    top_k: int
    dtype: str = "fp8_e4m3"

    @property
    def block(self) -> str:
        """As the tuning file's name has it."""
        return "128x128" if self.dtype == "fp8_e4m3" else "1x32"

    def draw(self) -> RandomExperts:
        """Random experts of the dtype, which has a tuning file."""
        experts = drawn("FP8" if self.dtype == "fp8_e4m3" else "INT4", self.experts, self.inter)
        if self.dtype != "int4_w2_bf16":
            return experts
        dense = _normal(self.experts, HIDDEN, self.inter)
        down = Weight({"weight": dense}, None, W4A16_ORDERS[1])
        return RandomExperts("INT4", ExpertWeights(experts.stored.gate_up, down))


@dataclass(frozen=True)
class RandomExperts:
    """Experts of a rank, [E, 2I, H] and [E, H, I], in the order that our kernels take.

    Attributes:
        name: of the format.
        stored: as the model holds them.
    """

    name: str
    stored: ExpertWeights

    def ours(self, choice: ExpertChoice | None = None) -> Operation:
        """What the model calls; of FP8 and INT4 with a launch of its own where `choice` is given."""
        if choice is None:
            return lambda x, indices, weights: routed_experts(x, self.stored, indices, weights)
        how = [int(value) for value in astuple(choice)]
        if self.name == "FP8":
            return lambda x, *routing: moe_fp8(x, *fp8_tensors(self.stored), *routing, choice=how)
        return lambda x, *routing: moe_w4a16(x, *four_bit_tensors(self.stored), *routing, choice=how)

    @property
    def shape(self) -> tuple[int, int]:
        """(experts, intermediate size)."""
        first = next(iter(self.stored.gate_up.tensors.values()))
        return first.shape[0], first.shape[1] // 2

    @property
    def bytes_each(self) -> float:
        """Bytes of one expert's weights and scales."""
        both = *self.stored.gate_up.tensors.values(), *self.stored.down.tensors.values()
        return sum(tensor[0].numel() * tensor.element_size() for tensor in both)

    def dequantized(self, number: int) -> tuple[Tensor, Tensor]:
        """An expert's gate_up_proj [2I, H] and down_proj [H, I] in float64."""
        both = self.stored.gate_up, self.stored.down
        first, second = (dequantize(weight.expert(number), torch.float32).double() for weight in both)
        return first, second

    def reference(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """float64 [T, H] of a few tokens."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for token in range(x.shape[0]):
            for expert, weight in zip(indices[token].tolist(), weights[token].double(), strict=True):
                gate_up, down = self.dequantized(expert)
                gate, up = (gate_up @ x[token].double()).chunk(2)
                out[token] += weight * (down @ (silu(gate) * up))
        return out


def checkpoint(experts: RandomExperts, some: range) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some INT4 experts' packed weights and scales as a checkpoint holds them."""
    found: list[Tensor] = []
    for weight in (experts.stored.gate_up, experts.stored.down):
        assert weight.order is not None
        restored = [weight.order.restore(weight.expert(number).tensors) for number in some]
        found += [
            torch.stack([tensors[suffix] for tensors in restored]) for suffix in ("weight_packed", "weight_scale")
        ]
    first, first_scale, second, second_scale = found
    return first, first_scale, second, second_scale


def drawn(name: str, experts: int, inter: int, hidden: int = HIDDEN, device: str = "cuda") -> RandomExperts:
    """Of one of FORMATS, weights of deviation about 0.02; of four bits any words are in our kernel's order."""
    weights = []
    for shape, order in zip(((experts, 2 * inter, hidden), (experts, hidden, inter)), W4A16_ORDERS, strict=True):
        if name == "BF16":
            weights.append(Weight({"weight": _normal(*shape, device=device)}))
        elif name == "FP8":
            few = random_fp8(min(experts, DIFFERENT), *shape[1:], device)
            tensors = [part.repeat(-(-experts // len(part)), 1, 1)[:experts] for part in few]
            weights.append(Weight(dict(zip(("weight", "weight_scale_inv"), tensors, strict=True)), Fp8BlockFormat()))
        else:
            kind, scheme = FOUR_BITS[name]
            packed = [*random_packed(*shape, device, kind)]
            if kind.scale == torch.float8_e4m3fn:
                packed.append(torch.full((*shape[:2], 1), 2.0**-16, device=device))
            weights.append(Weight(dict(zip(scheme.suffixes, packed, strict=False)), scheme, order))
    return RandomExperts(name, ExpertWeights(weights[0], weights[1]))


def _normal(*shape: int, device: str = "cuda") -> Tensor:
    return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(std=0.02)


def random_fp8(experts: int, rows: int, columns: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Random e4m3 matrices and their scales, one a block of 128x128."""
    weight = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=device)
    for matrix in weight:
        matrix.copy_((torch.randn(rows, columns, device=device) * 60).clamp(-448, 448))
    scale = torch.rand(experts, rows // BLOCK, columns // BLOCK, device=device) + 0.5
    return weight, scale * (0.02 / 60)


def random_packed(experts: int, rows: int, columns: int, device: str, kind: FourBits) -> tuple[Tensor, Tensor]:
    """Random words, every stored nibble in 1..15, and scales that make weights of deviation about 0.02.

    NVFP4's are those times 2^16, for which its scale of all makes up.
    """
    nibbles = torch.randint(1, 16, (experts, rows, columns // 2, 2), dtype=torch.uint8, device=device)
    packed = (nibbles[..., 0] | (nibbles[..., 1] << 4)).view(torch.int32)
    scale = torch.rand(experts, rows, columns // kind.group, device=device) + 0.5
    if kind.scale == torch.uint8:
        return packed, (scale.log2().round() + 127 - 7).to(torch.uint8)
    if kind.scale == torch.float8_e4m3fn:
        return packed, (scale * 448 / 1.5).to(kind.scale)
    return packed, (scale * (0.02 / 4.3)).bfloat16()


def draw_inputs(
    shape: Shape, routing: Routing, tokens: int, seed: int, bytes_each: float = 0.0
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Tokens with their routings, int32 indices, so many that what they read does not fit the L2.

    Args:
        bytes_each: of an expert; a token's experts are the least that a call reads.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    sets, enough = [], max(2, math.ceil(MOVED / max(1.0, shape.top_k * bytes_each)))
    for _ in range(min(enough, 12 if tokens <= 8 else 6 if tokens <= 512 else 2 if tokens <= 4096 else 1)):
        x = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).bfloat16()
        indices, weights = routing.draw(tokens, shape.top_k, shape.experts, generator)
        sets.append((x, indices.int().contiguous(), weights.contiguous()))
    return sets


def distinct(sets: Sequence[tuple[Tensor, Tensor, Tensor]]) -> float:
    """Mean number of experts that a set's tokens go to."""
    return float(statistics.mean(indices.unique().numel() for _, indices, _ in sets))
