"""Routed experts in each form that kernels take: drawn as stored, dequantized, and as the kernels' arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from exact import blocks
from torch import Tensor

from kimi_k2.kernels.experts import entries
from kimi_k2.kernels.experts.bf16 import moe_bf16
from kimi_k2.kernels.experts.fp8 import moe_fp8
from kimi_k2.kernels.experts.w4a16 import moe_w4a16
from kimi_k2.kernels.experts.w4a16_layout import prepare_w4a16
from kimi_k2.ops.experts import ExpertWeights
from kimi_k2.ops.linear import Weight, dequantize
from kimi_k2.quantization.fp8_block import Fp8BlockFormat
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.quantization.mxfp4 import CompressedMxfp4Format, QuarkMxfp4Format
from kimi_k2.quantization.nvfp4 import CompressedNvfp4Format, Nvfp4Format
from kimi_k2.quantization.stored import StoredFormat

FORMATS: dict[str, StoredFormat] = {
    "int4": Int4GroupFormat(),
    "int4-64": Int4GroupFormat(group_size=64),
    "int4-128": Int4GroupFormat(group_size=128),
    "mxfp4": QuarkMxfp4Format(),
    "mxfp4-packed": CompressedMxfp4Format(),
    "nvfp4": Nvfp4Format(),
    "nvfp4-packed": CompressedNvfp4Format(),
}


@functools.lru_cache(maxsize=8)
def _four_bits(name: str, experts: int, inter: int, hidden: int, device: str) -> tuple[Weight, Weight]:
    """Groups whose largest values differ by up to 2^8; gate and up of NVFP4 differ in their scale of all."""
    generator, format_ = torch.Generator(device).manual_seed(0), FORMATS[name]

    def held(rows: int, columns: int) -> dict[str, Tensor]:
        weight = torch.randn(rows, columns, generator=generator, device=device) * 0.02
        spread = torch.randint(-8, 1, (rows, columns // 16), generator=generator, device=device)
        with torch.device(device):  # where a format makes scales of its own
            return format_.hold(format_.quantize(weight * 2.0 ** spread.repeat_interleave(16, 1)))

    stacks: tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]] = ([], [])
    for _ in range(experts):
        gate, up = held(inter, hidden), held(inter, hidden)
        stacks[0].append({suffix: torch.cat((gate[suffix], up[suffix])) for suffix in gate})
        stacks[1].append(held(hidden, inter))
    gate_up, down = (
        Weight({suffix: torch.stack([tensors[suffix] for tensors in stack]) for suffix in stack[0]}, format_)
        for stack in stacks
    )
    return gate_up, down


def drawn(
    kind: str, experts: int, inter: int, hidden: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16,
    draw_on: str = "cpu",
) -> ExpertWeights:  # fmt: skip
    """[E, 2I, H] and [E, H, I] in the checkpoint's order.

    `fp8` has blocks, `bf16` values of `dtype`, others are names of FORMATS, drawn on `draw_on`; of `int4 w2_bf16` the
    second matrices are dequantized to BF16.
    """
    shapes, (name, _, w2_bf16) = ((experts, 2 * inter, hidden), (experts, hidden, inter)), kind.partition(" ")
    if name in ("fp8", "bf16"):
        one, other = (
            Weight(
                dict(zip(("weight", "weight_scale_inv"), blocks(*shape, device=device), strict=True)), Fp8BlockFormat()
            )
            if name == "fp8"
            else Weight({"weight": torch.randn(*shape, device=device).mul_(0.03).to(dtype)})
            for shape in shapes
        )
        return ExpertWeights(one, other)
    draw = _four_bits if draw_on == "cpu" else _four_bits.__wrapped__  # a GPU's memory is the test's alone
    gate_up, down = (
        Weight({suffix: tensor.to(device).clone() for suffix, tensor in weight.tensors.items()}, weight.quantization)
        for weight in draw(name, experts, inter, hidden, draw_on)
    )
    return ExpertWeights(gate_up, Weight({"weight": dequantize(down, torch.bfloat16)}) if w2_bf16 else down)


class Experts(NamedTuple):
    """An operation with the weights that it takes, and how they are stored."""

    operation: Callable[..., Tensor]
    weights: tuple[Any, ...]
    more: dict[str, Any]
    stored: ExpertWeights

    def __call__(self, x: Tensor, indices: Tensor, scores: Tensor, *others: Any, **more: Any) -> Tensor:
        return self.operation(x, *self.weights, indices, scores, *others, **self.more, **more)

    def matrices(self, number: int) -> tuple[Tensor, Tensor]:
        """An expert's in float64."""
        first, second = (
            dequantize(weight.expert(number), torch.float32) for weight in (self.stored.gate_up, self.stored.down)
        )
        return first.double(), second.double()


def of(stored: ExpertWeights) -> Experts:
    """The operation that takes any number of tokens."""
    if "weight_scale_inv" in stored.gate_up.tensors:
        return Experts(moe_fp8, entries.fp8_tensors(stored), {}, stored)
    if stored.gate_up.quantization is None:
        return Experts(moe_bf16, (stored.gate_up.tensors["weight"], stored.down.tensors["weight"]), {}, stored)
    packed = prepare_w4a16(*entries.four_bit_tensors(stored))
    return Experts(moe_w4a16, packed, entries._scales_of_all(stored), stored)
