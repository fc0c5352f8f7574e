"""The FP8-block GEMM for many tokens: the bits of `block_gemm`, and float64. Needs a Hopper GPU and nvcc."""

from __future__ import annotations

import pytest
import torch
from on_hopper import NEEDS_HOPPER, dense, distance

from kimi_k2.kernels.linear.block_gemm import block_gemm, quantize_groups
from kimi_k2.kernels.linear.wide_gemm import MOST_SHARED, TILES, wide_gemm

pytestmark = NEEDS_HOPPER


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "rows", "columns"),
    [(1, 72, 128), (64, 2112, 640), (129, 576, 1024), (300, 1536, 1536), (5000, 2112, 256), (3000, 4608, 1152)],
)
def test_product(tokens: int, rows: int, columns: int, terms: int) -> None:
    """Ragged rows and tokens, a warpgroup without tokens, one block of columns, more tiles than blocks."""
    torch.manual_seed(rows)
    for _ in range(2):
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        weight = (torch.randn(rows, columns, device="cuda") * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        weight_scale = (torch.rand(-(-rows // 128), columns // 128, device="cuda") + 0.5) * 1e-3
        fp8, scale = quantize_groups(x, terms=terms)
        scale[:, tokens:] = float("nan")  # what pads the scales touches nothing
        out = wide_gemm(fp8, scale, weight, weight_scale, [*TILES[-1], 1])
        restored = fp8.double().sum(0) * scale[:, :tokens].T.double().repeat_interleave(128, 1)
        assert distance(out, restored @ dense(weight, weight_scale).T) < 2.5e-3
        same = block_gemm(fp8, scale, weight, weight_scale, [1, 64, 1])
        for tile in TILES:
            assert torch.equal(wide_gemm(fp8, scale, weight, weight_scale, [*tile, 1]), same), tile


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("cluster", [2, 3, 5])
def test_shared_tiles(cluster: int, terms: int) -> None:
    """Blocks of a cluster have parts of the columns: as `block_gemm` sums them."""
    for tokens, rows, columns in ((1, 72, 640), (130, 2112, 1536), (300, 4608, 896)):
        x = torch.randn(tokens, columns, device="cuda").bfloat16()
        weight = (torch.randn(rows, columns, device="cuda") * 60).clamp(-448, 448).to(torch.float8_e4m3fn)
        weight_scale = (torch.rand(-(-rows // 128), columns // 128, device="cuda") + 0.5) * 1e-3
        fp8, scale = quantize_groups(x, terms=terms)
        scale[:, tokens:] = float("nan")
        same = block_gemm(fp8, scale, weight, weight_scale, [1, 64, cluster])
        for tile in TILES:
            if tile.rows <= MOST_SHARED:
                out = wide_gemm(fp8, scale, weight, weight_scale, [*tile, cluster])
                assert torch.equal(out, same), (tokens, rows, columns, tile)
