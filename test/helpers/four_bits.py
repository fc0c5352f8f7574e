"""Routed experts in each format that the four-bit kernels take: drawn, in the kernel's order, and dequantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k2.kernels.experts import entries
from kimi_k2.ops.experts import ExpertWeights
from kimi_k2.ops.linear import Weight
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


def _held(format_: StoredFormat, rows: int, columns: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A matrix as models hold it, by suffix, of groups whose largest values differ by up to 2^8."""
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    spread = torch.randint(-8, 1, (rows, columns // 16), generator=generator).repeat_interleave(16, 1)
    return format_.hold(format_.quantize(weight * 2.0**spread))


def drawn(format_: StoredFormat, experts: int, inter: int, hidden: int, seed: int = 0) -> ExpertWeights:
    """[E, 2I, H] and [E, H, I] in the checkpoint's order; gate and up of NVFP4 differ in their scale of all."""
    generator = torch.Generator().manual_seed(seed)
    stacks: tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]] = ([], [])
    for _ in range(experts):
        projections = [_held(format_, inter, hidden, generator) for _ in range(2)]
        stacks[0].append(
            {suffix: torch.cat([projection[suffix] for projection in projections]) for suffix in projections[0]}
        )
        stacks[1].append(_held(format_, hidden, inter, generator))
    gate_up, down = (
        Weight({suffix: torch.stack([tensors[suffix] for tensors in stack]) for suffix in stack[0]}, format_)
        for stack in stacks
    )
    return ExpertWeights(gate_up, down)


def arguments(experts: ExpertWeights) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `moe_w4a16` takes: the four tensors and NVFP4's own."""
    return entries._four_bit_experts(experts), entries._scales_of_all(experts)
