"""FP8 blocks against transformers' dequantization, INT4 groups against compressed-tensors, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimi_k2.errors import ConfigError
from kimi_k2.quantization.fp8_block import (
    block_grid,
    dequantize_fp8_block,
    quantize_fp8_block,
)
from kimi_k2.quantization.int4_group import pack_int4, unpack_int4
from kimi_k2.quantization.rows import CHUNK_VALUES, row_chunks
from kimi_k2.quantization.stored import formats

rows_columns = st.tuples(st.integers(1, 300), st.integers(1, 300))


@given(rows_columns, st.integers(0, 2**31), st.booleans())
@example((1024, 1000), 0, False)  # more values than are worked on at a time, and rows longer than them
@example((1024, 1000), 0, True)
@example((2, CHUNK_VALUES + 1), 0, False)
@settings(max_examples=40, deadline=None)
def test_fp8_dequantization_is_transformers(shape: tuple[int, int], seed: int, nan: bool) -> None:
    """Every e4m3 code, exponent 15 and subnormals included, with scales over six decades."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    codes[(codes & 0x7F) == 0x7F] = 0  # the two NaN codes
    if nan:
        codes[0, 0] = (0x7F, 0xFF)[seed % 2]
    weight = codes.view(torch.float8_e4m3fn)
    scale = torch.exp(torch.randn(block_grid(shape, (128, 128)), generator=generator) * 2)
    expected = fp8._dequantize_fp8_weight(weight, scale, [128, 128], torch.float32)
    torch.testing.assert_close(dequantize_fp8_block(weight, scale), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name, held in formats().items() if held.method])
def test_zeros_stay_zero_beside_others(name: str) -> None:
    """A block, a group, a row of them; their scales are none that a check refuses."""
    weight = torch.randn(384, 256, generator=torch.Generator().manual_seed(0))
    weight[:128, :128] = weight[200] = 0
    held = formats()[name](**dict[str, Any]({"checkpoint_format": "gptq_v2"} if name == "gptq" else {}))
    stored = held.quantize(weight)
    assert held.impossible_scales(stored) is None
    found = held.dequantize(stored, torch.float32)
    assert not found[:128, :128].any() and not found[200].any()
    assert found.count_nonzero() > 0.7 * weight.count_nonzero()
    assert all((stored[suffix].float() > 0).all() for suffix in held.scales)


def test_fp8_wrong_grid() -> None:
    quantized, scale = quantize_fp8_block(torch.zeros(130, 5))
    with pytest.raises(ValueError, match=r"expected shape \[2, 1\], got \[1, 1\]"):
        dequantize_fp8_block(quantized, scale[:1])


@given(rows_columns, st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_int4_packing_is_compressed_tensors(shape: tuple[int, int], seed: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    values = torch.randint(-8, 8, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(seed))
    packed = pack_int4(values)
    assert torch.equal(packed, helpers.pack_to_int32(values, 4))
    assert torch.equal(unpack_int4(packed, shape[1]), values)
    assert torch.equal(helpers.unpack_from_int32(packed, 4, torch.Size(shape)), unpack_int4(packed, shape[1]))


@pytest.mark.parametrize(("name", "where"), [("int4", "config_groups.*.weights."), ("gptq", "")])
def test_columns_that_do_not_divide_into_groups(name: str, where: str) -> None:
    held: Any = formats()[name]
    with pytest.raises(ConfigError, match=r"x has 256 input columns, .* groups of 96") as caught:
        list(held(group_size=96).specs("x", 128, 256))
    assert caught.value.field == f"quantization_config.{where}group_size"


def test_chunks_of_rows_have_a_bounded_size() -> None:
    assert [rows for rows, _ in row_chunks(torch.empty(3, CHUNK_VALUES // 2))] == [slice(0, 2), slice(2, 4)]


def test_dequantization_on_a_device_reads_nothing_back() -> None:
    """A value read back to the host would end a CUDA graph's capture; a meta tensor has none to read."""
    weight = torch.empty(2, 576, 256, dtype=torch.float8_e4m3fn, device="meta")
    scale = torch.empty(2, 5, 2, device="meta")
    assert dequantize_fp8_block(weight, scale, dtype=torch.bfloat16).shape == weight.shape
