"""Linears of few tokens, and the norms and residual sums before them, against float64."""

from __future__ import annotations

from itertools import product

import torch
from exact import E4M3, ROUNDED_ONCE, blocks, dense, distance, normed
from machines import Machine, rows
from torch import Tensor

from kimi_k2.kernels.linear.fused_linear import DECODE_COLUMNS, fused_add_linear, fused_linear, most_tokens
from kimi_k2.kernels.rowwise.decode import add_norm, add_norm_apart, norm_apart
from kimi_k2.kernels.rowwise.prefill import row_norm
from kimi_k2.ops.linear import Weight, add_project, float32_linear, project

SHAPES = [(2112, 7168), (1536, 1536), (7168, 1024), (512, 7168), (7168, 256)]
# Widths that are compiled, ragged rows, one block of columns.
BEHIND_SUM = [
    *SHAPES[:2], (576, 7168), (7170, 1024), (512, 2048), (72, 256), (64, 512), (7168, 2304), (7168, 4096),
]  # fmt: skip
PLAIN, NORM, BOTH = (False, False), (True, False), (True, True)  # with norm, with residual sum
ON_GPU = [(tokens, *shape, fp8, *how) for tokens, shape, fp8, how in product((1, 5, 16), SHAPES, (1, 0), (NORM, PLAIN))]
ON_GPU += [(tokens, *shape, fp8, *BOTH) for tokens, shape, fp8 in product((1, 2, 3, 4, 6, 8, 16), BEHIND_SUM, (1, 0))]
DTYPES = torch.bfloat16, E4M3
TAKEN = [row for row in ON_GPU if row[0] <= most_tokens(torch.empty(*row[1:3], dtype=DTYPES[row[3]], device="meta"))]
ON_CPU = [(1, 11, columns, fp8, *BOTH) for columns in DECODE_COLUMNS for fp8 in (1, 0)] + [
    (3, 10, 7168, 1, *BOTH), (4, 140, 1024, 1, *PLAIN), (2, 9, 1536, 1, *NORM), (3, 9, 2048, 0, *BOTH),
    (8, 20, 7168, 1, *BOTH), (5, 33, 1536, 1, False, True), (7, 20, 256, 1, *PLAIN), (3, 1041, 7168, 1, *BOTH),
    (5, 20, 512, 1, *BOTH), (4, 9, 2304, 1, *NORM), (6, 11, 4096, 1, False, True), (8, 33, 2048, 1, *NORM),
    (13, 35, 1536, 1, *NORM),
]  # fmt: skip


@rows("tokens rows columns fp8 with_norm with_sum", gpu=TAKEN, cpu=ON_CPU)
def test_product(
    machine: Machine, tokens: int, rows: int, columns: int, fp8: int, with_norm: bool, with_sum: bool
) -> None:
    x = machine.normal(tokens, columns + (0 if with_sum else 64))[:, :columns]  # rows may be strided
    weight, scale = blocks(rows, columns, device=machine.device) if fp8 else (machine.normal(rows, columns), None)
    norm = machine.normal(columns) if with_norm else None
    delta = machine.normal(tokens, columns) if with_sum else None
    summed = x.double() if delta is None else x.double() + delta.double()
    wanted = (summed if norm is None else normed(summed, norm)) @ dense(weight, scale).T
    if delta is not None:
        out, total = fused_add_linear(x, delta, weight, scale, norm, 1e-6)
        assert torch.equal(total, x + delta)
    else:
        out = fused_linear(x, weight, scale, norm, 1e-6)
        assert torch.equal(out, fused_linear(x, weight, scale, norm, 1e-6))
    assert distance(out, wanted) < machine.limit(5e-3)


@rows("tokens", gpu=[(2,)], cpu=[(2,)])
def test_product_of_values_outside_float16(machine: Machine, tokens: int) -> None:
    """Blocks of 128 columns far above and far below float16's range, one of zeros, one of a single large value."""
    exponents = torch.tensor([60, -60, 30, 17, -30, 0, 0, 0], device=machine.device)
    x = torch.randn(tokens, 8, 128, device=machine.device) * 2.0 ** exponents[:, None]
    x[:, 5], x[:, 6, 0] = 0, 3e4
    given, (weight, _) = x.flatten(1).bfloat16(), blocks(3, 1024, device=machine.device)
    scale = 2.0 ** -exponents[None]  # so that every block counts
    scale[0, 6] = 1e-4
    assert distance(fused_linear(given, weight, scale), given.double() @ dense(weight, scale).T) < 3e-3


@rows(
    "tokens columns",
    gpu=[(3, 7168), (16, 1024)],
    cpu=[(2, columns) for columns in (1024, 7168, 8192)],
    triton=[(2, 300)],
)
def test_residual_sum_and_norm(machine: Machine, tokens: int, columns: int) -> None:
    """Also with the quotient apart, for a GEMM to take."""
    x, delta, weight = machine.normal(tokens, columns), machine.normal(tokens, columns), machine.normal(columns)
    summed = x.double() + delta.double()

    def check(found: Tensor, inverse: Tensor | float, exact: Tensor) -> None:
        assert distance(found.double() * inverse, normed(exact, weight)) < machine.limit(ROUNDED_ONCE)

    wide = torch.cat((x, delta), dim=1)[:, :columns]
    if machine.name != "cpu":
        check(row_norm(wide, weight, 1e-6), 1.0, x)
    if machine.name == "triton":
        return
    total, found = add_norm(x, delta, weight, 1e-6)
    assert torch.equal(total, x + delta)
    check(found, 1.0, summed)
    total, apart, inverse = add_norm_apart(x, delta, weight, 1e-6)
    assert torch.equal(total, x + delta) and torch.equal(apart, (summed.float() * weight.float()).bfloat16())
    check(apart, inverse.double()[:, None], summed)
    apart, inverse = norm_apart(wide, weight, 1e-6)
    check(apart, inverse.double()[:, None], x)


@rows("tokens rows columns", gpu=[
    (tokens, *shape) for tokens, shape in product((1, 2, 4, 16, 17, 64, 65), (*SHAPES[:3], (20480, 7168)))
])  # fmt: skip
def test_bf16_behind_norm_and_residual_sum(machine: Machine, tokens: int, rows: int, columns: int) -> None:
    """Those that `dense_gemm` takes outside of batch-invariant mode, and the ones next to them."""
    weight, norm = Weight({"weight": machine.normal(rows, columns, scale=0.02)}), machine.normal(columns)
    x, delta, exact = (
        machine.normal(tokens, columns + 64)[:, 64:],
        machine.normal(tokens, columns),
        weight.tensors["weight"].double().T,
    )
    # Tokens and results are rounded to BF16 once each, 2.35e-3; the sum, too: 2.87e-3.
    most, whole = 2.6e-3, x.contiguous()
    few = 1 < tokens < 17 or (1 < tokens < 65 and rows < 20480)
    given = (x, weight, norm, 1e-6)
    assert (project.choose(*given).name == "dense_gemm") == few
    assert distance(project(*given), normed(x, norm) @ exact) < most
    assert distance(project(whole, weight), whole.double() @ exact) < most
    assert (add_project.choose(whole, delta, weight, norm, 1e-6).name == "dense_gemm") == few
    out, total = add_project(whole, delta, weight, norm, 1e-6)
    assert torch.equal(total, whole + delta)
    assert distance(out, normed(whole.double() + delta.double(), norm) @ exact) < most


@rows("tokens", gpu=[(1,), (2,), (16,), (17,), (65,)])
def test_logits_are_not_rounded(machine: Machine, tokens: int) -> None:
    """Sums in float32 of the products of BF16 values, which rounding to BF16 would move by 1.65e-3."""
    x, weight = machine.normal(tokens, 7168), machine.normal(20480, 7168)
    wanted, found = x.double() @ weight.double().T, float32_linear(x, weight)
    assert found.dtype == torch.float32
    assert distance(found, wanted) < 1e-4
    few = tokens < 65
    assert (float32_linear.choose(x, weight).name == "dense_gemm") == few
    assert not few or torch.equal(found[-1:], float32_linear(x[-1:], weight))  # however many are with it
