"""What a machine without a GPU can see of the decode products: shapes, refusals, choices."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k2.errors import KernelError
from kimi_k2.kernels.linear.fused_linear import choose_launch, fused_linear, supports_fp8_linear
from kimi_k2.kernels.rowwise.decode import absorb_and_store, add_norm

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def test_fake_shapes() -> None:
    with FakeTensorMode():
        x, weight, scale = torch.empty(3, 7168, dtype=BF16), torch.empty(2112, 7168, dtype=E4M3), torch.empty(17, 56)
        assert fused_linear(x, weight, scale).shape == (3, 2112)
        assert fused_linear(x, weight.to(BF16)).dtype == BF16
        q, kv_a = torch.empty(3, 8 * 192, dtype=BF16), torch.empty(3, 2112, dtype=BF16)[:, 1536:]
        cos, w_uk = torch.empty(3, 32, dtype=BF16), torch.empty(8, 128, 512, dtype=BF16)
        cache, positions = torch.empty(3, 70, 576, dtype=BF16), torch.zeros(3, dtype=torch.int64)
        norm = torch.empty(512, dtype=BF16)
        assert absorb_and_store(q, kv_a, norm, cos, cos, positions, w_uk, cache, 1e-6).shape == (3, 8, 576)
        with pytest.raises(KernelError, match="w_uk"):
            absorb_and_store(q, kv_a, norm, cos, cos, positions, w_uk[:, :64], cache, 1e-6)
        total, normed = add_norm(x, x, x[0], 1e-6)
        assert total.shape == normed.shape == x.shape


@pytest.mark.parametrize(
    ("tokens", "columns", "scale_rows", "dtype", "message"),
    [
        (17, 256, 1, E4M3, "at most 16"),
        (1, 192, 1, E4M3, "multiple of 128"),
        (1, 256, 2, E4M3, "scale"),
        (1, 256, 1, BF16, "weight"),
    ],
)
def test_refusals(tokens: int, columns: int, scale_rows: int, dtype: torch.dtype, message: str) -> None:
    with FakeTensorMode(), pytest.raises(KernelError, match=message):
        x, weight = torch.empty(tokens, columns, dtype=BF16), torch.empty(128, columns, dtype=dtype)
        fused_linear(x, weight, torch.empty(scale_rows, columns // 128))


@pytest.mark.parametrize(("rows", "columns"), [(2112, 7168), (1536, 1536), (7168, 1024), (512, 7168), (7168, 256)])
def test_splits_cut_the_input_at_scale_blocks(rows: int, columns: int) -> None:
    splits, block_rows = choose_launch(rows, columns)
    assert columns % (splits * 128) == 0
    assert 128 % block_rows == 0


def test_a_cpu_is_left_to_the_plain_function() -> None:
    weight, scale = torch.empty(128, 256, dtype=E4M3), torch.empty(1, 2)
    assert not supports_fp8_linear(torch.empty(1, 256, dtype=BF16), weight, scale, (128, 128))
