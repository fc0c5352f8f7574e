"""Shares MLA decode attention's work out by the lengths, on the device: `torch.ops.kimi_k2.mla_plan`.

Splitting every context into the same number of parts leaves most of the GPU idle behind one long context. A plan says
for each thread block which part of which context it takes, in parts of about the same size (csrc/mla_plan.cu). It
depends on the lengths alone: one plan, made once a step, serves the attention of all layers, and a captured CUDA graph
makes it anew at every replay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import expect, launch
from kimi_k2.kernels.common.operation import kernel_operation

MAX_BATCH = 1024
# (batch up to, waves of blocks that the grid has room for): the more contexts, the smaller their parts, so that one
# long context among many still ends with the others. A block without work costs the grid about half a microsecond.
WAVES = ((40, 1), (96, 2), (MAX_BATCH, 4))
# What a block costs beside its rows, about 4 us, in units of 64 rows: 74 KB of bfloat16, half as many of e4m3.
OVERHEAD = {False: 2.0, True: 4.0}


def available() -> bool:
    """Whether a plan can be made and followed here: it is CUDA C++."""
    return find_nvcc() is not None


def slots_for(batch: int, sm_count: int) -> int:
    """Blocks of the grid that follows a plan."""
    waves = next(waves for most, waves in WAVES if batch <= most)
    return max(waves, -(-batch // sm_count)) * sm_count


def _check(seq_lens: Tensor) -> None:
    if seq_lens.dim() != 1 or not 1 <= seq_lens.shape[0] <= MAX_BATCH:
        raise KernelError(f"seq_lens has shape {list(seq_lens.shape)}, expected [B] with B from 1 to {MAX_BATCH}")
    expect("seq_lens", seq_lens, seq_lens.device, tuple(seq_lens.shape), torch.int32)


@kernel_operation("mla_plan")
def mla_plan(seq_lens: Tensor, capacity: int, quantized: bool = False) -> Tensor:
    """The plan for `mla_decode` over contexts of these lengths.

    Args:
        seq_lens: int32 [B], B up to 1024.
        capacity: rows that the cache can hold of a sequence; longer lengths are clamped to it.
        quantized: the cache is e4m3, which takes half the time to read.

    Returns:
        int32 [B + blocks, 4], as csrc/mla_plan.cuh says.

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    _check(seq_lens)
    batch = seq_lens.shape[0]
    sm_count = hopper(seq_lens.device.index, "mla_plan")[1]
    slots = slots_for(batch, sm_count)
    plan = torch.empty(batch + slots, 4, dtype=torch.int32, device=seq_lens.device)
    sizes = batch, capacity, slots, sm_count
    launch(
        "attention/mla_plan", "kimi_mla_plan", "mla_plan", seq_lens.device, seq_lens, plan, *sizes, OVERHEAD[quantized]
    )
    return plan


mla_plan.fake(_check, lambda seq_lens: seq_lens.new_empty(len(seq_lens) + slots_for(len(seq_lens), 132), 4))
