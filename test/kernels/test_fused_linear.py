"""What a machine without a GPU can see of the decode products: shapes, refusals, choices."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.kernels.linear.fused_linear import choose_launch, supports_fp8_linear

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.mark.parametrize(("rows", "columns"), [(2112, 7168), (1536, 1536), (7168, 1024), (512, 7168), (7168, 256)])
def test_splits_cut_the_input_at_scale_blocks(rows: int, columns: int) -> None:
    splits, block_rows = choose_launch(rows, columns)
    assert columns % (splits * 128) == 0
    assert 128 % block_rows == 0


def test_a_cpu_is_left_to_the_plain_function() -> None:
    weight, scale = torch.empty(128, 256, dtype=E4M3), torch.empty(1, 2)
    assert not supports_fp8_linear(torch.empty(1, 256, dtype=BF16), weight, scale, (128, 128))
