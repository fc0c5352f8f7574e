"""Time of the GEMMs of a TP8 rank with the norm before them, beside cuBLAS on a BF16 weight of the same shape.

Where vLLM is installed, DeepGEMM too, with the quantization of its input; neither has a norm to do.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_k2.bench.kernels.harness import graph_median
from kimi_k2.bench.kernels.mla_cases import relative
from kimi_k2.bench.kernels.row import Row
from kimi_k2.errors import KernelError
from kimi_k2.kernels.linear.block_gemm import block_gemm, quantize_groups
from kimi_k2.kernels.linear.fused_linear import fused_linear
from kimi_k2.kernels.rowwise.prefill import fp8_block_to_bf16, row_norm

SHAPES = {
    "q_a|kv_a": (2112, 7168),
    "q_b": (1536, 1536),
    "o_proj": (7168, 1024),
    "shared gate|up": (512, 7168),
    "shared down": (7168, 256),
    "dense gate|up": (4608, 7168),
    "dense down": (7168, 2304),
}
MANY = (16, 32, 64, 128, 256, 1024, 4096, 8192)
SPLITS = (1, 2, 4, 7, 8, 14, 28)
BLOCK = 128
# Of the peer: rounding its input to e4m3 gives 2.6e-2.
MOST_ERROR = 0.05


def deep_gemm(weight: Tensor, scale: Tensor) -> Iterator[tuple[str, Callable[[Tensor, Tensor], object]]]:
    """(name, GEMM of x [T, K] and weight [N, K]) if vLLM and DeepGEMM are installed; checked on this weight.

    Raises:
        KernelError: its result is not the GEMM's.
    """
    if importlib.util.find_spec("vllm") is None:
        return
    try:
        gemms: Any = importlib.import_module("vllm.utils.deep_gemm")
        fp8: Any = importlib.import_module("vllm.model_executor.layers.quantization.utils.fp8_utils")
    except ImportError:  # parts of vLLM are missing
        return
    if not gemms.is_deep_gemm_supported():
        return

    def run(x: Tensor, weight: Tensor) -> Tensor:
        given = fp8.per_token_group_quant_fp8(
            x, BLOCK, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=False
        )
        out = x.new_empty(x.shape[0], weight.shape[0])
        gemms.fp8_gemm_nt(given, (weight, scale), out, is_deep_gemm_e8m0_used=False)
        return out

    x = torch.randn(16, weight.shape[1], device="cuda").bfloat16()
    wide = scale.double().repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)
    found = relative(run(x, weight), x.double() @ (weight.double() * wide).T)
    if not found < MOST_ERROR:
        raise KernelError(f"DeepGEMM: {found:.1e} from float64, expected below {MOST_ERROR}")
    yield "DeepGEMM with quantization", run


def rows(with_peers: bool = True, sweep: bool = False) -> Iterator[Row]:
    """Each shape at 1 and 8 tokens and, quantized, at more; `sweep` adds every launch of few tokens."""
    for name, (count, columns) in SHAPES.items():
        sets = max(8, min(64, 2**28 // (count * columns)))
        weights = [(torch.randn(count, columns, device="cuda") * 60).to(torch.float8_e4m3fn) for _ in range(sets)]
        scale = torch.rand(-(-count // 128), columns // 128, device="cuda") * 1e-3
        norm = torch.ones(columns, device="cuda").bfloat16()
        for tokens in (1, 8):
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            launches = {"ours": (0, 16)}
            if sweep:
                launches |= {
                    f"splits {s}, rows {r}": (s, r) for s in SPLITS for r in (16, 32, 64) if columns // 128 % s == 0
                }
            for label, (splits, strip) in launches.items():
                calls = [partial(fused_linear, x, w, scale, norm, 1e-6, splits, strip) for w in weights]
                moved, flops = count * columns, 2 * tokens * count * columns
                yield Row("norm + FP8 GEMM", f"{name}, T={tokens}", label, graph_median(calls), moved, flops)
            if with_peers:
                wide = [w.bfloat16() for w in weights]
                seconds = graph_median([partial(torch.mm, x, w.t()) for w in wide])
                yield Row("norm + FP8 GEMM", f"{name}, T={tokens}", "cuBLAS BF16", seconds, 2 * moved, flops)
                for label, peer in deep_gemm(weights[0], scale):
                    seconds = graph_median([partial(peer, x, w) for w in weights])
                    yield Row("norm + FP8 GEMM", f"{name}, T={tokens}", label, seconds, moved, flops)
        yield from _many(name, weights, scale, norm, with_peers)


def _many(name: str, weights: list[Tensor], scale: Tensor, norm: Tensor, with_peers: bool) -> Iterator[Row]:
    """Counts of tokens that are quantized, together with the norm, and what was before; cuBLAS has no norm to do."""
    count, columns = weights[0].shape

    def quantized(terms: int, x: Tensor, weight: Tensor) -> None:
        block_gemm(*quantize_groups(x, norm, terms=terms), weight, scale)

    def dequantized(x: Tensor, weight: Tensor) -> None:
        torch.mm(row_norm(x, norm, 1e-6), fp8_block_to_bf16(weight, scale).t())

    others = dict(deep_gemm(weights[0], scale)) if with_peers else {}
    for tokens in MANY:
        x, used = torch.randn(tokens, columns, device="cuda").bfloat16(), weights[: 8 if tokens < 1024 else 2]
        ways: dict[str, Callable[[Tensor, Tensor], object]] = {}
        ways |= {"two terms": partial(quantized, 2), "e4m3": partial(quantized, 1), "dequantized, cuBLAS": dequantized}
        ways |= others
        for label, way in ways.items():
            if with_peers or label != "dequantized, cuBLAS":
                microseconds = graph_median([partial(way, x, w) for w in used])
                moved, flops = count * columns, 2 * tokens * count * columns
                yield Row("norm + FP8 GEMM", f"{name}, T={tokens}", label, microseconds, moved, flops)
