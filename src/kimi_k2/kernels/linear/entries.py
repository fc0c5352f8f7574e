"""The kernels for linears in the table of operations, with the plain functions' arguments."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.linear import block_gemm, dense_gemm, fused_linear, tuning, wide_gemm
from kimi_k2.kernels.rowwise.decode import add_norm_apart, norm_apart
from kimi_k2.ops import experts as ops_experts
from kimi_k2.ops import linear as ops_linear
from kimi_k2.ops.linear import Weight
from kimi_k2.ops.registry import batch_invariant, is_decoding

BLOCK = (128, 128)
# Up to here the tokens need no launch before the GEMM's; up to so many with a weight of BIG values, which is multiplied
# as long as it is read.
FEW, FEW_OF_BIG, BIG = fused_linear.DECODE_TOKENS, 1, 16_000_000
FEW_OF_NARROW = fused_linear.DECODE_TOKENS_NARROW
# BF16 tokens that `dense_gemm` takes outside of batch-invariant mode, and those behind a norm, whose quotient is a
# factor of its sums.
DENSE, NORMED_DENSE = range(2, 17), range(2, 65)
# And those whose sums are not rounded. Of a head of 20,480 rows in two parts, always: 74 us of one token, cuBLAS 78; 81
# and 82 of 64; 95 and 82 of 128.
FLOAT32 = range(1, 65)
ONE_ORDER = "one order of the columns: parts by the weight's shape"


def _quantizable(x: Tensor, rows: int, columns: int) -> bool:
    """Tokens [..., K] that the quantizing kernels can read, for a weight [N, K] in FP8 blocks."""
    return (
        x.is_cuda
        and x.shape[-1] == columns
        and x.dim() > 1
        and (x.dim() == 2 or x.is_contiguous())
        and block_gemm.takes_rows(x)
        and block_gemm.supports(x.numel() // columns, rows, columns, x.device)
    )


def _fits_two_terms(x: Tensor, rows: int, columns: int) -> bool:
    if batch_invariant():
        return _quantizable(x, rows, columns)
    fewest = FEW_OF_BIG if rows * columns >= BIG else FEW_OF_NARROW if columns == fused_linear.NARROW else FEW
    tokens = x.numel() // x.shape[-1]
    fits = (tokens > fewest or columns not in fused_linear.DECODE_COLUMNS) and _quantizable(x, rows, columns)
    return fits and _choice(2, tokens, rows, columns, x.device).kernel != "cublas"


def _supports_few(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> bool:
    """What `fused_linear` takes, unless the quantizing GEMM takes it."""
    fits = tuple(block_size) == BLOCK and fused_linear.supports(x, weight, weight_scale_inv)
    return fits and not _fits_two_terms(x, *weight.shape)


ops_linear.fp8_linear.entry("fused_linear", takes=_supports_few)(fused_linear.fp8_linear)


Takes = Callable[[Tensor, Tensor | None, Weight, Tensor | None], bool]
Linear = Callable[..., tuple[Tensor, Tensor]]


def _add_linear(name: str, takes: Takes, run: Linear, joins: dict[str, str], **how: Any) -> None:
    """Entries of `project` and `add_project`: a linear behind a norm and a residual sum, which the first has not.

    Args:
        takes: x, delta, weight and norm_weight.
        run: `add_project`; None for nothing to add, or without a norm.
        joins: of `project`; `add_project` stands for it and `add_norm` too.
        how: further words of both entries.
    """

    def supports_project(x: Tensor, weight: Weight, norm_weight: Tensor | None = None, *_: float) -> bool:
        return takes(x, None, weight, norm_weight)

    @ops_linear.project.entry(name, takes=supports_project, joins=joins, **how)
    def project(x: Tensor, weight: Weight, norm_weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
        return run(x, None, weight, norm_weight, eps)[0]

    both = {"add_norm": "fused", "project": name, **joins}
    ops_linear.add_project.entry(name, takes=lambda *given: takes(*given[:4]), joins=both, **how)(run)


def _linear_fits(x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor | None) -> bool:
    """FP8 blocks or BF16, few BF16 tokens; not those that `dense_gemm` takes."""
    if weight.fp8_block is not None:
        stored = weight.tensors["weight"], weight.tensors["weight_scale_inv"]
        return _supports_few(x, *stored, weight.fp8_block)
    matrix = weight.tensors["weight"]
    if weight.quantization is not None or x.dim() != 2 or (len(x) in DENSE and dense_gemm.supports(x, matrix)):
        return False
    return fused_linear.supports(x, matrix)


def _fused(
    x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`fused_add_linear`; `fused_linear` where there is nothing to add."""
    stored = weight.tensors["weight"], weight.tensors.get("weight_scale_inv")
    if delta is None:
        rows = x if block_gemm.takes_rows(x) else x.contiguous()
        return fused_linear.fused_linear(rows, *stored, norm_weight, eps), x
    return fused_linear.fused_add_linear(x, delta, *stored, norm_weight, eps)


_add_linear("fused_linear", _linear_fits, _fused, {"fp8_linear": "fused_linear"})


def _choice(terms: int, tokens: int, rows: int, columns: int, device: torch.device) -> tuning.LinearChoice:
    """The tuned launch on this GPU; in batch-invariant mode the fixed one."""
    if batch_invariant():
        return tuning.fixed_choice(tokens, rows, columns, decoding=is_decoding())
    return tuning.choose(terms, tokens, rows, columns, hopper(device.index, "block_gemm")[0])


def multiply(quantized: tuple[Tensor, Tensor], weight: Tensor, scale: Tensor) -> Tensor:
    """Tokens of `quantize_groups` times a weight [N, K] in FP8 blocks, by the chosen launch: bfloat16 [T, N]."""
    (terms, tokens, columns), rows = quantized[0].shape, weight.shape[0]
    choice = _choice(terms, tokens, rows, columns, weight.device)
    gemm = wide_gemm.wide_gemm if choice.kernel == "wide" else block_gemm.block_gemm
    return gemm(*quantized, weight, scale, choice.launch)


def _multiply_weight(quantized: tuple[Tensor, Tensor], weight: Weight) -> Tensor:
    return multiply(quantized, weight.tensors["weight"], weight.tensors["weight_scale_inv"])


def _norm_fits(norm_weight: Tensor | None) -> bool:
    return norm_weight is None or norm_weight.shape[0] <= block_gemm.MAX_NORM


def add_entries(name: str, terms: int, fits: Callable[[Tensor, int, int], bool], *, optional: bool) -> None:
    """Entries of the linears for `block_gemm` of tokens in so many terms.

    Args:
        name: of the entries.
        fits: whether tokens [..., K] and a weight's N and K are theirs.
        optional: see `ops.registry.Entry`.
    """

    def by_blocks(x: Tensor, weight: Weight) -> bool:
        return weight.fp8_block == BLOCK and fits(x, *weight.tensors["weight"].shape)

    def supports_fp8_linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> bool:
        return tuple(block_size) == BLOCK and fits(x, *weight.shape)

    how: dict[str, Any] = {"optional": optional, "batch_invariant": ONE_ORDER}

    @ops_linear.fp8_linear.entry(name, takes=supports_fp8_linear, **how)
    def fp8_linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> Tensor:
        flat = x if x.dim() == 2 else x.flatten(0, -2)
        quantized = block_gemm.quantize_groups(flat, terms=terms)
        out = multiply(quantized, weight, weight_scale_inv)
        return out.view(*x.shape[:-1], weight.shape[0])

    def supports_linear(x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor | None) -> bool:
        fits = x.dim() == 2 and _norm_fits(norm_weight) and (delta is None or x.is_contiguous())
        return fits and by_blocks(x, weight)

    # The norm and the residual sum are part of the quantization.
    def linear(
        x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if delta is None:
            return _multiply_weight(block_gemm.quantize_groups(x, norm_weight, eps, terms=terms), weight), x
        apart = batch_invariant() and is_decoding()
        total, fp8, scale = block_gemm.add_quantize(x, delta, norm_weight, eps, terms, apart)
        return _multiply_weight((fp8, scale), weight), total

    _add_linear(name, supports_linear, linear, {"fp8_linear": name}, **how)

    def supports_swiglu(x: Tensor, gate_up: Weight, down: Weight) -> bool:
        if x.dim() != 2 or not by_blocks(x, gate_up) or down.fp8_block != BLOCK:
            return False
        rows, columns = down.tensors["weight"].shape
        if columns % BLOCK[1] or rows % 8:
            return False
        return terms == 1 or _choice(terms, len(x), rows, columns, x.device).kernel != "cublas"

    # silu(gate) * up is part of the second quantization. No entry of silu_and_mul does this one's part: where one is
    # pinned, this one is not taken.
    joins = {"fp8_linear": name, "project": name, "silu_and_mul": ""}

    @ops_experts.swiglu.entry(name, takes=supports_swiglu, joins=joins, **how)
    def swiglu(x: Tensor, gate_up: Weight, down: Weight) -> Tensor:
        hidden = _multiply_weight(block_gemm.quantize_groups(x, terms=terms), gate_up)
        return _multiply_weight(block_gemm.quantize_groups(hidden, swiglu=True, terms=terms), down)


add_entries("block_gemm", 2, _fits_two_terms, optional=False)
# As the checkpoint's activation scheme has it: every linear's inputs rounded by 2.6 %.
add_entries("e4m3", 1, _quantizable, optional=True)


def _parts(x: Tensor, weight: Tensor) -> int:
    """Parts of the columns that `dense_gemm` sums apart."""
    if batch_invariant():
        return dense_gemm.decode_cluster(*weight.shape) if is_decoding() else 1
    return dense_gemm.fastest_cluster(x.numel() // x.shape[-1], *weight.shape)


def _dense(x: Tensor, weight: Tensor, parts: int, wide: bool = False) -> Tensor:
    """`dense_gemm`, for tokens of any dimensions."""
    out: Tensor = dense_gemm.dense_gemm(x.reshape(-1, x.shape[-1]).contiguous(), weight, parts, wide)
    return out.view(*x.shape[:-1], len(weight))


def _fits_dense(few: range, x: Tensor, weight: Tensor) -> bool:
    """In batch-invariant mode, and so few tokens: of others cuBLAS is as fast or faster."""
    return (batch_invariant() or x.numel() // x.shape[-1] in few) and dense_gemm.supports(x, weight)


@ops_linear.dense_linear.entry("dense_gemm", takes=partial(_fits_dense, DENSE), batch_invariant=ONE_ORDER)
def dense_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`dense_gemm`, for tokens of any dimensions."""
    return _dense(x, weight, _parts(x, weight))


@ops_linear.float32_linear.entry("dense_gemm", takes=partial(_fits_dense, FLOAT32), batch_invariant=ONE_ORDER)
def float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`dense_gemm`, as its sums are."""
    parts = _parts(x, weight) if batch_invariant() else dense_gemm.fastest_cluster(1, *weight.shape)
    return _dense(x, weight, parts, wide=True)


def _fits_behind_norm(tokens: int, weight: Weight) -> bool:
    """In a decode step of batch-invariant mode; a few tokens, of a head's many rows only where one tile holds them."""
    if batch_invariant():
        return is_decoding()
    many = -(-weight.tensors["weight"].shape[0] // 64) > dense_gemm.BLOCKS
    return tokens in (DENSE if many else NORMED_DENSE)


def _fits_dense_linear(x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor | None) -> bool:
    """In a decode step of batch-invariant mode, and a few tokens, behind a norm."""
    if norm_weight is None or weight.quantization is not None or x.dim() != 2 or not _fits_behind_norm(len(x), weight):
        return False
    whole = (x.stride(1) == 1 and x.stride(0) % 8 == 0) if delta is None else x.is_contiguous()
    return whole and x.shape[1] <= block_gemm.MAX_NORM and dense_gemm.supports(x, weight.tensors["weight"])


def _dense_behind_norm(
    x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """`dense_gemm`, which takes its sums times the norm's quotient too."""
    matrix, total = weight.tensors["weight"], x
    assert norm_weight is not None
    if delta is None:
        normed, inverse = norm_apart(x, norm_weight, eps)
    else:
        total, normed, inverse = add_norm_apart(x, delta, norm_weight, eps)
    return dense_gemm.dense_gemm(normed, matrix, _parts(x, matrix), False, inverse), total


_add_linear(
    "dense_gemm",
    _fits_dense_linear,
    _dense_behind_norm,
    {"rms_norm": "triton", "dense_linear": "dense_gemm", "fp8_linear": "block_gemm"},
    batch_invariant=ONE_ORDER,
)
