"""Routed experts with random weights, and inputs for them: our operation, and in float64 what it should compute."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu

from kimi_k2.bench.kernels.routing import Routing
from kimi_k2.kernels.experts import fp8_decode
from kimi_k2.kernels.experts.bf16 import moe_bf16
from kimi_k2.kernels.experts.fp8 import BLOCK, moe_fp8
from kimi_k2.kernels.experts.tuning import ExpertChoice
from kimi_k2.kernels.experts.w4a16 import moe_w4a16
from kimi_k2.kernels.experts.w4a16_layout import FORMATS as W4A16_FORMATS
from kimi_k2.kernels.experts.w4a16_layout import INT4, FourBits, PreparedW4A16, restore_w4a16
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.quantization.mxfp4 import CompressedMxfp4Format
from kimi_k2.quantization.nvfp4 import Nvfp4Format
from kimi_k2.quantization.stored import StoredFormat

HIDDEN = 7168
# FP8 experts that differ; the others repeat them, as drawing 17 GB of a layer at TP1 takes seconds.
DIFFERENT = 7
MOVED = 4e8  # bytes that a case's inputs read together at least, or as many sets as there are: several times the L2

FOUR_BITS: dict[str, tuple[FourBits, StoredFormat]] = dict(
    zip(
        ("INT4", "MXFP4", "NVFP4", "INT4-64", "INT4-128"),
        zip(
            W4A16_FORMATS,
            (
                Int4GroupFormat(), CompressedMxfp4Format(), Nvfp4Format(), Int4GroupFormat(group_size=64),
                Int4GroupFormat(group_size=128),
            ),
            strict=True,
        ),
        strict=True,
    )
)  # fmt: skip
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
        if self.dtype == "fp8_e4m3":
            return draw_fp8(self.experts, self.inter)
        return int4_experts(random_int4(self.experts, self.inter, w2_bf16=self.dtype == "int4_w2_bf16"))


@dataclass(frozen=True)
class RandomExperts:
    """Experts of a rank, [E, 2I, H] and [E, H, I], stored in one format.

    Attributes:
        name: of the format.
        weights: and their scales, in the order that our operation takes them.
        operation: by tokens, experts a token and pinned choice the one of ours that the model would take.
        dequantized: by number an expert's gate_up_proj [2I, H] and down_proj [H, I] in float64.
    """

    name: str
    weights: Sequence[Tensor | None]
    operation: Callable[[int, int, list[int] | None], Callable[..., Tensor]]
    dequantized: Callable[[int], tuple[Tensor, Tensor]]

    def ours(self, tokens: int, top_k: int, choice: ExpertChoice | None = None) -> Operation:
        """Our operation for so many tokens; with a launch of its own where `choice` is given."""
        operation = self.operation(tokens, top_k, None if choice is None else [int(v) for v in astuple(choice)])
        return lambda x, indices, weights: operation(x, *self.weights, indices, weights)

    @property
    def shape(self) -> tuple[int, int]:
        """(experts, intermediate size)."""
        assert self.weights[0] is not None
        return self.weights[0].shape[0], self.weights[0].shape[1] // 2

    @property
    def bytes_each(self) -> float:
        """Bytes of one expert's weights and scales."""
        return sum(weight[0].numel() * weight.element_size() for weight in self.weights if weight is not None)

    def reference(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """float64 [T, H] of a few tokens."""
        out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for token in range(x.shape[0]):
            for expert, weight in zip(indices[token].tolist(), weights[token].double(), strict=True):
                gate_up, down = self.dequantized(expert)
                gate, up = (gate_up @ x[token].double()).chunk(2)
                out[token] += weight * (down @ (silu(gate) * up))
        return out


def fp8_experts(weights: tuple[Tensor, Tensor, Tensor, Tensor]) -> RandomExperts:
    """e4m3 with a scale a block of 128x128; `weights` as `random_fp8` makes them."""
    gate_up, gate_up_scale, down, down_scale = weights
    _, hidden, inter = down.shape

    def operation(tokens: int, top_k: int, choice: list[int] | None) -> Callable[..., Tensor]:
        if choice is None and fp8_decode.supports(tokens, top_k, hidden, inter, gate_up.device):
            return fp8_decode.moe_decode
        return partial(moe_fp8, choice=choice)

    def whole(weight: Tensor, scale: Tensor) -> Tensor:
        return weight.double() * scale.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)

    return RandomExperts(
        "FP8", weights, operation, lambda e: (whole(gate_up[e], gate_up_scale[e]), whole(down[e], down_scale[e]))
    )


def int4_experts(weights: PreparedW4A16, name: str = "INT4") -> RandomExperts:
    """Four-bit weights of `random_int4` in our kernel's order, in a format of FOUR_BITS."""
    kind, scheme = FOUR_BITS[name]
    count, rows = weights.gate_up_proj_packed.shape[:2]
    wholes: list[Tensor] = []
    if kind.scale == torch.float8_e4m3fn:
        sizes = rows, weights.down_proj_packed.shape[1]
        wholes = [torch.full((count, size, 1), 2.0**-16, device=weights.gate_up_proj_packed.device) for size in sizes]
    more = dict(zip(("gate_up_proj_all", "down_proj_all"), wholes, strict=False))

    def dequantized(expert: int) -> tuple[Tensor, Tensor]:
        stored = [part[0] for part in checkpoint(weights, slice(expert, expert + 1))]
        first, second = (
            scheme.dequantize(
                dict(
                    zip(
                        scheme.suffixes,
                        (*stored[at : at + 2], *(whole[expert] for whole in wholes[at // 2 :])),
                        strict=False,
                    )
                ),
                torch.float32,
            ).double()
            for at in (0, 2)
        )
        return first, second

    return RandomExperts(name, weights, lambda _tokens, _k, choice: partial(moe_w4a16, choice=choice, **more),
                         dequantized)  # fmt: skip


def checkpoint(weights: PreparedW4A16, experts: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Some experts' packed weights and scales as a checkpoint holds them."""
    assert weights.down_proj_scale is not None
    return restore_w4a16(PreparedW4A16(*(weight[experts] for weight in weights if weight is not None)))


def bf16_experts(weights: tuple[Tensor, Tensor]) -> RandomExperts:
    """Not quantized."""
    return RandomExperts(
        "BF16", weights, lambda *_: moe_bf16, lambda e: (weights[0][e].double(), weights[1][e].double())
    )


def draw_fp8(experts: int, inter: int) -> RandomExperts:
    """On the GPU, DIFFERENT ones repeated."""
    few = random_fp8(min(experts, DIFFERENT), inter, HIDDEN)
    first, first_scale, second, second_scale = (
        part.repeat(-(-experts // part.shape[0]), 1, 1)[:experts] for part in few
    )
    return fp8_experts((first, first_scale, second, second_scale))


def draw_bf16(experts: int, inter: int) -> RandomExperts:
    """On the GPU."""
    sizes = (experts, 2 * inter, HIDDEN), (experts, HIDDEN, inter)
    first, second = (torch.empty(size, device="cuda", dtype=torch.bfloat16).normal_(std=0.02) for size in sizes)
    return bf16_experts((first, second))


def draw_four_bits(name: str, experts: int, inter: int) -> RandomExperts:
    """On the GPU, in a format of FOUR_BITS."""
    return int4_experts(random_int4(experts, inter, kind=FOUR_BITS[name][0]), name)


# By format: experts and intermediate size to weights of deviation about 0.02 on the GPU.
FORMATS: dict[str, Callable[[int, int], RandomExperts]] = {
    "FP8": draw_fp8,
    "BF16": draw_bf16,
    **{name: partial(draw_four_bits, name) for name in FOUR_BITS},
}


def random_fp8(experts: int, inter: int, hidden: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random gate_up_proj, its scales, down_proj, its scales, in the shapes that `moe_fp8` takes."""

    def weight(rows: int, columns: int) -> Tensor:
        made = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=device)
        for expert in made:
            expert.copy_((torch.randn(rows, columns, device=device) * 60).clamp(-448, 448))
        return made

    def scale(rows: int, columns: int) -> Tensor:
        return (torch.rand(experts, rows // BLOCK, columns // BLOCK, device=device) + 0.5) * (0.02 / 60)

    return weight(2 * inter, hidden), scale(2 * inter, hidden), weight(hidden, inter), scale(hidden, inter)


def random_packed(
    experts: int, rows: int, columns: int, device: str = "cuda", kind: FourBits = INT4
) -> tuple[Tensor, Tensor]:
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


def random_int4(
    experts: int, inter: int, hidden: int = HIDDEN, w2_bf16: bool = False, device: str = "cuda", kind: FourBits = INT4
) -> PreparedW4A16:
    """Random four-bit weights taken as already prepared: any words are."""
    first = random_packed(experts, 2 * inter, hidden, device, kind)
    if not w2_bf16:
        return PreparedW4A16(*first, *random_packed(experts, hidden, inter, device, kind))
    dense = torch.empty(experts, hidden, inter, dtype=torch.bfloat16, device=device).normal_(std=0.02)
    return PreparedW4A16(*first, dense, None)


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
