"""Modelled cost of our kernels at the sizes of one rank, run on the emulator: `python -m kimi_k2.nki.figures`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from kimi_k2.nki.cost import cost_of
from kimi_k2.nki.install import install
from kimi_k2.nki.launch import Kernel

HIDDEN, EXPERTS, TOP_K, RANK, ROPE = 7168, 384, 8, 512, 64
SCALING, SOFTMAX_SCALE = 2.827, 0.1447


def router(tokens: int) -> Kernel:
    """The router for `tokens` tokens, BF16."""
    from kimi_k2.nki.kernels.router import noaux_tc_router

    kernel: Kernel = noaux_tc_router[2]
    hidden, weight = torch.randn(tokens, HIDDEN).bfloat16(), torch.randn(HIDDEN, EXPERTS).bfloat16() * 0.02
    kernel(hidden, weight, torch.zeros(1, EXPERTS), SCALING)
    return kernel


def attention(slots: int, heads: int) -> Kernel:
    """MLA over a cache of one sequence, BF16."""
    from kimi_k2.nki.kernels.mla_decode import mla_decode

    kernel: Kernel = mla_decode[2]
    shapes = ((1, heads, RANK + ROPE), (1, slots, RANK), (1, slots, ROPE), (1, RANK), (1, ROPE))
    drawn = [torch.randn(shape).bfloat16() for shape in shapes]
    kernel(*drawn, torch.full((1, 1), slots, dtype=torch.int32), SOFTMAX_SCALE)
    return kernel


def experts(width: int, held: int) -> Kernel:
    """One token's 8 experts of width `width`, of which `held` are this rank's, FP8 with block scales."""
    import ml_dtypes
    import numpy as np

    from kimi_k2.nki.kernels.experts import selective_experts

    kernel: Kernel = selective_experts[2]
    blocks = HIDDEN // 128
    gate_up = np.zeros((TOP_K, 128, blocks, 2 * width), ml_dtypes.float8_e4m3)
    down = np.zeros((TOP_K, width, HIDDEN), ml_dtypes.float8_e4m3)
    scales = np.ones((TOP_K, 2, blocks), np.float32), np.ones((TOP_K, blocks), np.float32)
    index = torch.arange(TOP_K, dtype=torch.int32)[None] + (TOP_K - held)
    hidden = torch.randn(1, HIDDEN).bfloat16()
    kernel(
        hidden, gate_up, scales[0], down, scales[1], index, torch.ones(1, TOP_K), 0, TOP_K if held == TOP_K else EXPERTS
    )
    return kernel


def runs() -> Iterator[tuple[str, Kernel]]:
    """Name and kernel, run once."""
    for tokens in (1, 16, 64):
        yield f"router, {tokens} tokens", router(tokens)
    for slots in (4096, 16384):
        yield f"MLA, {slots} slots, 1 head", attention(slots, 1)
    yield "MLA, 4096 slots, 2 heads", attention(4096, 2)
    yield "8 experts of width 32 (TP64)", experts(32, 8)
    yield "4 of 8 experts of width 64 (TP32/EP2)", experts(64, 4)


def main() -> None:
    """Print a table: one row a kernel, of the core that takes longer."""
    install()
    engines = ("dma", "tensor", "vector", "scalar", "gpsimd")
    out = sys.stdout
    titles = " | ".join(f"{engine} us" for engine in engines)
    out.write(f"| kernel, LNC=2 | HBM MB a core | descriptors | {titles} | bound | span us |\n")
    out.write("|---|" + "---|" * (len(engines) + 4) + "\n")
    for name, kernel in runs():
        cost = cost_of(kernel)
        times = " | ".join(f"{cost.busy.get(engine, 0) * 1e6:.1f}" for engine in engines)
        row = f"| {name} | {cost.hbm_bytes / 1e6:.2f} | {cost.descriptors} | {times} | {cost.bound} |"
        out.write(f"{row} {cost.span * 1e6:.1f} |\n")


if __name__ == "__main__":
    main()
