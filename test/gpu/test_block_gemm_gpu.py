"""The FP8-block GEMM and what quantizes its tokens, against float64. Needs a Hopper GPU and nvcc."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from e4m3 import rounded
from exact import blocks, dense, distance, normed
from on_hopper import NEEDS_HOPPER
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.linear import wide_gemm as wide
from kimi_k2.kernels.linear.block_gemm import TILES, add_quantize, block_gemm, padded, quantize_groups

pytestmark = NEEDS_HOPPER


def restored(x: Tensor, scale: Tensor) -> Tensor:
    """The e4m3 tokens in float64."""
    return x.double().sum(0) * scale[:, : x.shape[1]].T.double().repeat_interleave(128, 1)


def product(gemm: Callable[..., Tensor], terms: int, tokens: int, rows: int, columns: int, *launch: int) -> None:
    torch.manual_seed(tokens + rows)
    x = torch.randn(tokens, columns, device="cuda").bfloat16()
    weight, weight_scale = blocks(rows, columns)
    fp8, scale = quantize_groups(x, terms=terms)
    scale[:, tokens:] = float("nan")  # what pads the scales touches nothing
    wanted = restored(fp8, scale) @ dense(weight, weight_scale).T
    out = gemm(fp8, scale, weight, weight_scale, list(launch))
    # bf16 rounds by 1.7e-3; the tensor cores keep about 14 bits of a sum of e4m3 products.
    assert distance(out, wanted) < 2.5e-3, (tokens, rows, columns, launch)
    if terms == 2:  # as near as bf16 tokens and weights are
        assert distance(out, x.double() @ dense(weight, weight_scale).T) < 3e-3
    for column in (0, rows - 1):
        assert distance(out[:, column], wanted[:, column]) < 1e-2
    assert distance(out[tokens - 1], wanted[tokens - 1]) < 5e-3
    assert torch.equal(out, gemm(fp8, scale, weight, weight_scale, list(launch))), "not deterministic"


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("tile", TILES)
def test_every_launch(terms: int, tile: int) -> None:
    """Ragged rows and tokens; one block a tile, and clusters that share one, unevenly too."""
    for tokens, rows, columns in ((tile, 576, 1024), (2 * tile + 9, 2112, 640), (3, 72, 2304)):
        for cluster in (1, 2, 3, 5, 8):
            if cluster <= columns // 128:
                product(block_gemm, terms, tokens, rows, columns, 1, tile, cluster)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("tile", [tile for tile in wide.TILES if tile.turns])
def test_warpgroups_take_turns(terms: int, tile: wide.Tile) -> None:
    """Odd and even blocks of columns, one each at least; ragged rows and tokens; several tiles a block; shared ones."""
    for tokens, rows, columns in ((64, 576, 256), (137, 2112, 640), (3, 72, 2304), (900, 4608, 896), (3000, 2112, 384)):
        for cluster in (1, 2, 3, 5, 8):
            if tile.shared(cluster, columns):
                product(wide.wide_gemm, terms, tokens, rows, columns, *tile, cluster)


@pytest.mark.parametrize(
    ("gemm", "launch", "tokens"),
    [
        (block_gemm, [1, 64, 1], 65),
        (block_gemm, [1, 32, 1], 128),
        (wide.wide_gemm, [2, 128, 1], 1024),
        (wide.wide_gemm, [1, 128, 1], 1024),
    ],
)
def test_beside_the_next_launch(
    gemm: Callable[..., Tensor], launch: list[int], tokens: int, next_launch: Callable[..., None]
) -> None:
    """What a stage of the ring holds is read before the copy engine fills it anew."""
    tokens_and_scales = quantize_groups(torch.randn(tokens, 1536, device="cuda").bfloat16(), terms=2)
    weight = blocks(1536, 1536)
    next_launch(lambda: (gemm(*tokens_and_scales, *weight, launch),))


def test_many_tiles() -> None:
    """More tiles than blocks: a block's ring is filled for the next tile while this one is stored."""
    for terms in (1, 2):
        product(block_gemm, terms, 3000, 4608, 1280, 1, 64, 1)
        product(block_gemm, terms, 3000, 2112, 1280, 1, 32, 1)
        product(block_gemm, terms, 5000, 2112, 256, 1, 16, 1)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("sizes", [
    (1, 72, 128, 1), (64, 2112, 640, 1), (129, 576, 1024, 1), (300, 1536, 1536, 1), (5000, 2112, 256, 1),
    (3000, 4608, 1152, 1),
    *((*sizes, cluster) for sizes in ((1, 72, 640), (130, 2112, 1536), (300, 4608, 896)) for cluster in (2, 3, 5)),
])  # fmt: skip
def test_wide_gemm_has_the_bits_of_block_gemm(sizes: tuple[int, int, int, int], terms: int) -> None:
    """Ragged rows and tokens, a warpgroup without tokens, one block of columns, more tiles than blocks; shared ones."""
    tokens, rows, columns, cluster = sizes
    torch.manual_seed(rows)
    for _ in range(2):
        x, (weight, weight_scale) = torch.randn(tokens, columns, device="cuda").bfloat16(), blocks(rows, columns)
        fp8, scale = quantize_groups(x, terms=terms)
        scale[:, tokens:] = float("nan")  # what pads the scales touches nothing
        same = block_gemm(fp8, scale, weight, weight_scale, [1, 64, cluster])
        assert distance(same, restored(fp8, scale) @ dense(weight, weight_scale).T) < 2.5e-3
        for tile in wide.TILES:
            if tile.shared(cluster, columns) and not tile.turns:
                found = wide.wide_gemm(fp8, scale, weight, weight_scale, [*tile, cluster])
                assert torch.equal(found, same), tile


def close_to_rounding(found: Tensor, exact: Tensor, share: float) -> None:
    """No further from the exact values than their rounding; of it, `share` may come from values at two steps' middle.

    They go the other way where a scale's or a bf16 value's last bit differs.
    """
    cost = distance(rounded(exact), exact)
    assert distance(found, exact) < 1.05 * cost
    assert distance(found, rounded(exact)) < share * cost


@pytest.mark.parametrize(("tokens", "columns"), [(1, 7168), (9, 1536), (70, 256), (513, 7168), (33, 18432)])
def test_quantization(tokens: int, columns: int) -> None:
    torch.manual_seed(tokens)
    x = torch.randn(tokens, columns, device="cuda").bfloat16() * (torch.rand(tokens, 1, device="cuda") + 0.1).bfloat16()
    x[0, :128] = 0
    strided = torch.cat((x, x), dim=1)[:, :columns]
    for given in (x, strided):
        fp8, scale = quantize_groups(given)
        close_to_rounding(restored(fp8, scale), x.double(), 0.25)
        assert scale.shape == (columns // 128, padded(tokens))
        assert not fp8[0, 0, :128].float().any()
        # The second term is what the first leaves; one more bf16 digit than x has is lost.
        both, scale = quantize_groups(given, terms=2)
        assert torch.equal(both[:1].float(), fp8.float())
        assert distance(restored(both, scale), x.double()) < 1.5e-3
    gate, up = torch.randn(2, tokens, columns, device="cuda").bfloat16()
    fp8, scale = quantize_groups(torch.cat((gate, up), dim=1), swiglu=True)
    close_to_rounding(restored(fp8, scale), F.silu(gate.double()) * up.double(), 0.8)
    if columns > 8192:
        with pytest.raises(KernelError, match="G <= 8192"):
            quantize_groups(x, torch.ones(columns, device="cuda").bfloat16())
        return
    norm = torch.rand(columns, device="cuda").bfloat16() + 0.5
    delta = torch.randn_like(x)

    # Two roundings to bf16 before the one to e4m3.
    fp8, scale = quantize_groups(strided, norm, 1e-5)
    close_to_rounding(restored(fp8, scale), normed(x, norm, 1e-5), 0.8)
    total, fp8, scale = add_quantize(x, delta, norm, 1e-5)
    assert torch.equal(total, x + delta)
    assert distance(restored(*add_quantize(x, delta, norm, 1e-5, 2)[1:]), normed(x + delta, norm, 1e-5)) < 4e-3
    close_to_rounding(restored(fp8, scale), normed(x + delta, norm, 1e-5), 0.8)
