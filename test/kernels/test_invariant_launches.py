"""Launches of batch-invariant mode: what orders a sum does not change with the number of tokens."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.kernels.experts import invariant, w4a16_few
from kimi_k2.kernels.experts.tuning import choose, default_choice
from kimi_k2.kernels.linear import block_gemm, dense_gemm, tuning, wide_gemm

TOKENS = (1, 2, 8, 9, 16, 64, 200, 256, 1024, 16384)
WEIGHTS = [(2112, 7168), (1536, 1536), (7168, 1024), (512, 7168), (7168, 256), (4608, 7168), (20480, 7168), (128, 128)]
EXPERTS = [("fp8_e4m3", "128x128"), ("int4", "1x32"), ("int4_w2_bf16", "1x32")]


@pytest.mark.parametrize(("rows", "columns"), WEIGHTS)
def test_linears_have_one_number_of_parts(rows: int, columns: int) -> None:
    for decoding in (True, False):
        made = [tuning.fixed_choice(tokens, rows, columns, decoding=decoding) for tokens in TOKENS]
        assert len({one.cluster for one in made}) == 1
        for one in made:
            tiles = [(1, tile) for tile in block_gemm.TILES] if one.kernel == "block" else wide_gemm.TILES
            assert (one.groups, one.tile) in tiles and one.cluster <= max(1, columns // 128)
        assert decoding or made[0].cluster == 1
        assert [one.kernel for one in made] == ["block" if tokens <= 64 else "wide" for tokens in TOKENS]
    assert 1 <= dense_gemm.decode_cluster(rows, columns) <= max(1, columns // dense_gemm.COLUMNS)


@pytest.mark.parametrize(("dtype", "block"), EXPERTS)
@pytest.mark.parametrize(("experts", "inter"), [(384, 256), (384, 512), (48, 2048)])
@pytest.mark.filterwarnings("ignore:no tuned choices")
def test_experts_have_one_number_of_parts(dtype: str, block: str, experts: int, inter: int) -> None:
    tuned = [
        choose(tokens, 8, experts, inter, 7168, dtype=dtype, block=block, device="NVIDIA H200") for tokens in TOKENS
    ]
    assert len({(one.fused, one.splits1, one.splits2) for one in tuned}) > 1
    int4 = dtype != "fp8_e4m3"
    for decoding in (True, False):
        made = [
            invariant.fixed_choice(one, tokens, 8, 7168, inter, decoding=decoding, int4=int4)
            for tokens, one in zip(TOKENS, tuned, strict=True)
        ]
        assert len({(one.splits1, one.splits2) for one in made}) == 1
        # INT4 multiplies tiles of up to 32 tokens otherwise than larger ones; FP8 all alike, as a GPU's tests hold.
        assert not int4 or len({one.max_tokens > 32 for one in made}) == 1
        for tokens, one in zip(TOKENS, made, strict=True):
            one.check(tokens, 8, 7168, inter)
            assert one.fused == (decoding and int4 and tokens < invariant.INNER_TOKENS)
    assert invariant.fixed_bf16_launch(decoding=True) != invariant.fixed_bf16_launch(decoding=False)


@pytest.mark.parametrize("hidden", range(512, 8193, 512))
def test_items_of_int4_have_whole_slabs(hidden: int) -> None:
    tuned = default_choice(16, 8, 384, 256, hidden)
    invariant.fixed_choice(tuned, 16, 8, hidden, 256, decoding=True, int4=True).check(16, 8, hidden, 256)
    assert tuned.fused


def test_a_shared_expert_joins_int4_ones_where_its_parts_are_the_kernels() -> None:
    def shared(inter: int, hidden: int = 7168, dtype: torch.dtype = torch.bfloat16) -> bool:
        with torch.device("meta"):
            return w4a16_few.supports_shared(
                torch.empty(2 * inter, hidden, dtype=dtype), torch.empty(hidden, inter, dtype=dtype)
            )

    assert shared(256) and shared(128) and not shared(2048) and not shared(256, dtype=torch.float32)
    for inter in range(64, 2049, 64):
        parts = dense_gemm.decode_cluster(2 * inter, 7168), dense_gemm.decode_cluster(7168, inter)
        assert not shared(inter) or parts == (w4a16_few.SHARED_PARTS, 1)
