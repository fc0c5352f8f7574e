"""MLA decode attention over a BF16 cache in CUDA C++: what `torch.ops.kimi_k2.mla_decode` runs where nvcc is found.

csrc/mla_decode.cu says how a block works. The split of the context and the join of its parts are `mla_decode`'s: by the
shapes alone, lengths read on the device, parts joined in a fixed order. The tensor maps are kernel parameters, encoded
on every call: a captured CUDA graph keeps them.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.build import find_nvcc, load_library
from kimi_k2.kernels.mla_decode import HEADS, LATENT, LOG2_E, PAGE, ROW

MAX_SPLITS = 128
_POINTERS = ("table", "lengths", "out", "parts", "sums")
_INTEGERS = ("batch", "heads", "splits", "table_stride", "capacity", "cluster")


@dataclass(frozen=True)
class CudaLaunch:
    """How the CUDA kernel is launched.

    Attributes:
        splits: parts of the context, at most 128.
        cluster: parts joined by their blocks through shared memory, a divisor of `splits` up to 8; 1: none.
        few: the form for 8 heads, three stages deep instead of two.
    """

    splits: int
    cluster: int = 1
    few: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.splits <= MAX_SPLITS or self.cluster not in (1, 2, 4, 8) or self.splits % self.cluster:
            raise KernelError(f"{self}: expected splits 1 to {MAX_SPLITS}, cluster a divisor of it among 1, 2, 4, 8")


class _Arguments(ctypes.Structure):
    """`mla::Arguments` of csrc/mla_decode.cuh, field for field."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in _POINTERS],
        *[(name, ctypes.c_int) for name in _INTEGERS],
        ("scale", ctypes.c_float),
    ]


@functools.cache
def available() -> bool:
    """Whether the kernel can be compiled here."""
    return find_nvcc() is not None


def supports_shape(heads: int, cache_dtype: torch.dtype) -> bool:
    """Whether the kernel takes this many heads over such a cache."""
    return heads in HEADS and cache_dtype == torch.bfloat16


def choose_launch(batch: int, heads: int, capacity: int, multiprocessors: int = 132) -> CudaLaunch:
    """Launch for the shapes: one wave of blocks, none with less than one step of 64 rows of context."""
    splits = max(1, min(multiprocessors // max(1, batch), 64, -(-capacity // PAGE)))
    return CudaLaunch(splits, few=heads == 8)


def run(
    q: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    block_table: Tensor | None,
    launch: CudaLaunch,
) -> Tensor:
    """`mla_decode` with the launch pinned, arguments unchecked.

    Raises:
        KernelError: there is no CUDA compiler, or the launch failed.
    """
    batch, heads = q.shape[:2]
    out = q.new_empty(batch, heads, LATENT)
    if batch == 0:
        return out
    capacity = cache.shape[1] if block_table is None else block_table.shape[1] * PAGE
    if cache.numel() == 0 or capacity == 0:
        return out.zero_()
    arguments = _Arguments(
        lengths=seq_lens.data_ptr(), out=out.data_ptr(), batch=batch, heads=heads, splits=launch.splits,
        cluster=launch.cluster, capacity=capacity, scale=softmax_scale * LOG2_E,
    )  # fmt: skip
    if block_table is not None:
        arguments.table, arguments.table_stride = block_table.data_ptr(), block_table.shape[1]
    if (joined := launch.splits // launch.cluster) > 1:
        parts = q.new_empty(batch, heads, joined, LATENT, dtype=torch.float32)
        sums = q.new_empty(batch, heads, joined, dtype=torch.float32)
        arguments.parts, arguments.sums = parts.data_ptr(), sums.data_ptr()
    # Its headers include moe_*: the library's name covers every source.
    status = load_library("mla_launch.cu").kimi_mla_decode(
        ctypes.c_void_p(q.data_ptr()), ctypes.c_void_p(cache.data_ptr()), ctypes.c_int64(cache.numel() // ROW),
        ctypes.byref(arguments), launch.few,
        ctypes.c_void_p(torch.cuda.current_stream(q.device).cuda_stream),
    )  # fmt: skip
    if status:
        raise KernelError(f"mla_decode could not be launched: CUDA error {status} (1000 and above: our launcher's)")
    return out
