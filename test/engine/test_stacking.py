"""Two Linears as one: the same values, memory held once, and a copy only where a scale's block would straddle them."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.layer_step import stack_rows
from kimi_k2.model.linear import Linear
from kimi_k2.ops.linear import dequantize
from kimi_k2.synthetic.config import tiny_config, with_format

BF16 = torch.bfloat16


def quantized(rows: int, config: KimiK2Config, seed: int) -> Linear:
    """A Linear [rows, 256] of random values that the checkpoint's format keeps."""
    linear = Linear(config, "model.layers.1.mlp.experts.0.up_proj", rows, 256, dtype=BF16, keep_quantized=True)
    weight = torch.randn(rows, 256, generator=torch.Generator().manual_seed(seed))
    stored = {"weight": weight.to(BF16)} if config.quantization is None else config.quantization.quantize(weight)
    linear.load(stored)
    return linear


@pytest.mark.parametrize("preset", ["kimi-k2-instruct", "kimi-k2-thinking", "bf16"])
def test_both_become_views_of_one_weight(preset: str) -> None:
    config = with_format(tiny_config("kimi-k2-instruct"), "bf16") if preset == "bf16" else tiny_config(preset)
    first, second = quantized(128, config, 1), quantized(192, config, 2)
    wanted = torch.cat((first.dequantized(torch.float32), second.dequantized(torch.float32)))
    both = stack_rows(first, second, BF16)
    assert both.quantization == config.quantization
    assert torch.equal(dequantize(both, torch.float32), wanted)
    assert torch.equal(torch.cat((first.dequantized(torch.float32), second.dequantized(torch.float32))), wanted)
    again = stack_rows(first, second, BF16)
    for suffix, tensor in both.tensors.items():
        assert again.tensors[suffix].data_ptr() == tensor.data_ptr() == first.stored().tensors[suffix].data_ptr()
        assert torch.equal(again.tensors[suffix].view(torch.uint8), tensor.view(torch.uint8))
        held = tensor.untyped_storage().data_ptr()
        assert second.stored().tensors[suffix].untyped_storage().data_ptr() == held


def test_a_block_that_would_straddle_them_is_dequantized() -> None:
    config = tiny_config("kimi-k2-instruct")
    first, second = quantized(100, config, 1), quantized(64, config, 2)
    before = first.weight.data_ptr()
    both = stack_rows(first, second, BF16)
    assert both.quantization is None
    assert first.weight.data_ptr() == before
    assert torch.equal(both.tensors["weight"], torch.cat((first.dequantized(BF16), second.dequantized(BF16))))
