"""Cases of the GEMMs of a TP8 rank with the norm before them, if any, beside cuBLAS on a BF16 weight of the same shape.

Where vLLM is installed, DeepGEMM too, with the quantization of its input; neither has a norm to do.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimi_k2.bench.kernels.harness import Case, checked
from kimi_k2.kernels.linear import block_gemm, wide_gemm
from kimi_k2.kernels.linear.tuning import LinearChoice
from kimi_k2.kernels.rowwise.prefill import fp8_block_to_bf16, row_norm
from kimi_k2.ops import registry
from kimi_k2.ops.linear import Weight, project
from kimi_k2.quantization.fp8_block import Fp8BlockFormat

Way = Callable[[Tensor, Tensor], object]
Ways = dict[str, list[Callable[[], object]]]
SHAPES = {
    "q_a|kv_a": (2112, 7168),
    "q_b": (1536, 1536),
    "o_proj": (7168, 1024),
    "shared gate|up": (512, 7168),
    "shared down": (7168, 256),
    "dense gate|up": (4608, 7168),
    "dense down": (7168, 2304),
}
# Linears that a norm comes before and is part of.
NORMED = ("q_a|kv_a", "q_b")
FEW = 8
TOKENS = (1, FEW, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
E4M3 = "fp8_linear=e4m3"
BLOCK = 128
# Of the peer: rounding its input to e4m3 gives 2.6e-2.
MOST_ERROR = 0.05


def deep_gemm(weight: Tensor, scale: Tensor) -> Iterator[tuple[str, Way]]:
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
        quantized = fp8.per_token_group_quant_fp8(
            x, BLOCK, column_major_scales=True, tma_aligned_scales=True, use_ue8m0=False
        )
        out = x.new_empty(x.shape[0], weight.shape[0])
        gemms.fp8_gemm_nt(quantized, (weight, scale), out, is_deep_gemm_e8m0_used=False)
        return out

    x = torch.randn(16, weight.shape[1], device="cuda").bfloat16()
    wide = scale.double().repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)
    checked("DeepGEMM", run(x, weight), x.double() @ (weight.double() * wide).T, MOST_ERROR)
    yield "DeepGEMM with quantization", run


class Operands(NamedTuple):
    """Weights e4m3 [N, K] with their scales, and the norm before them, if one comes."""

    weights: list[Tensor]
    scale: Tensor
    norm: Tensor | None

    @classmethod
    def drawn(cls, name: str, sets: int) -> Operands:
        """Of a shape by name."""
        rows, columns = SHAPES[name]
        weights = [(torch.randn(rows, columns, device="cuda") * 60).to(torch.float8_e4m3fn) for _ in range(sets)]
        scale = torch.rand(-(-rows // BLOCK), columns // BLOCK, device="cuda") * 1e-3
        return cls(weights, scale, torch.ones(columns, device="cuda").bfloat16() if name in NORMED else None)

    def ours(self, x: Tensor, pins: str | None, weight: Tensor) -> None:
        """By the table's choice, or as pinned."""
        registry.pin(pins)
        project(x, Weight({"weight": weight, "weight_scale_inv": self.scale}, Fp8BlockFormat()), self.norm)
        registry.pin()

    def dequantized(self, x: Tensor, weight: Tensor) -> None:
        """cuBLAS behind the norm, on a weight that is dequantized before."""
        rows = x if self.norm is None else row_norm(x, self.norm, 1e-6)
        torch.mm(rows, fp8_block_to_bf16(weight, self.scale).t())


def cases(with_peers: bool) -> Iterator[Case]:
    """Each shape at 1 to 8192 tokens, by the table's choice and with e4m3 pinned.

    cuBLAS on BF16 weights for few tokens, without the norm; for more behind it.
    """
    for name, (count, columns) in SHAPES.items():
        sets = max(8, min(64, 2**28 // (count * columns)))
        given = Operands.drawn(name, sets)
        others = dict(deep_gemm(given.weights[0], given.scale)) if with_peers else {}
        for tokens in TOKENS:
            x = torch.randn(tokens, columns, device="cuda").bfloat16()
            used = given.weights[: sets if tokens <= FEW else 8 if tokens < 1024 else 2]
            ways: Ways = {
                label: [partial(given.ours, x, pins, weight) for weight in used]
                for label, pins in (("ours", None), ("ours, e4m3", E4M3))
            }
            if with_peers and tokens <= FEW:
                ways["cuBLAS BF16"] = [partial(torch.mm, x, weight.bfloat16().t()) for weight in used]
            elif with_peers:
                ways["dequantized, cuBLAS"] = [partial(given.dequantized, x, weight) for weight in used]
            ways |= {label: [partial(way, x, weight) for weight in used] for label, way in others.items()}
            kind = "FP8 GEMM" if given.norm is None else "norm + FP8 GEMM"
            yield Case(kind, f"{name}, T={tokens}", ways, count * columns, 2 * tokens * count * columns)


def launches(name: str, terms: int, tokens: int) -> dict[LinearChoice, list[Callable[[], object]]]:
    """By choice the calls of a graph: tokens quantized behind the norm, if one comes before, and every GEMM's launch.

    In two terms cuBLAS too, behind the norm and on a weight that is dequantized each time.
    """
    rows, columns = SHAPES[name]
    given = Operands.drawn(name, 8 if tokens < 1024 else 2)
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def call(choice: LinearChoice, weight: Tensor) -> None:
        gemm = wide_gemm.wide_gemm if choice.kernel == "wide" else block_gemm.block_gemm
        gemm(*block_gemm.quantize_groups(x, given.norm, terms=terms), weight, given.scale, choice.launch)

    choices = [
        LinearChoice("block", 1, tile, cluster)
        for tile in block_gemm.TILES
        for cluster in (1, 2, 3, 4, 5, 6, 8)
        if tokens <= 1024 and tile <= 2 * tokens and cluster <= columns // BLOCK
        if cluster == 1 or -(-rows // 64) * -(-tokens // tile) * cluster <= 2 * sms
    ] + [
        LinearChoice("wide", *tile, cluster)
        for tile in wide_gemm.TILES
        for cluster in (1, 2, 3, 4, 5, 6, 8)
        if tile.shared(cluster, columns)
        if cluster == 1 or -(-rows // tile.rows) * -(-tokens // (64 * tile.groups)) * cluster <= tile.blocks * sms
    ]  # fmt: skip
    ways: dict[LinearChoice, list[Callable[[], object]]]
    ways = {choice: [partial(call, choice, weight) for weight in given.weights] for choice in choices}
    if terms == 2:
        ways[LinearChoice("cublas")] = [partial(given.dequantized, x, weight) for weight in given.weights]
    return ways
