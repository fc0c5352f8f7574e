"""Trainium2's e4m3: every code, against ml_dtypes-free float64 arithmetic, and against clamping."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.quantization import neuron_e4m3
from kimi_k2.quantization.fp8_block import (
    dequantized_chunks,
    expand_block_scale,
    quantize_fp8_block,
)
from kimi_k2.quantization.neuron_e4m3 import NEURON_E4M3_MAX, halve_blocks, quantize_chunks

CODES = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)


def reserved_codes(weight: torch.Tensor) -> int:
    """Values that Trainium2 reads as NaN."""
    return int((weight.float().abs() > NEURON_E4M3_MAX).sum())


def test_halving_every_code() -> None:
    halved, doubled, inexact = halve_blocks(CODES.view(127, 2), torch.ones(127, 2), (1, 1), 1)
    value, halved = CODES.double(), halved.view(-1)
    assert bool((doubled == 2).all())
    assert reserved_codes(CODES) == 14
    assert reserved_codes(halved) == 0
    exact = halved.double() * 2 == value
    rounded = torch.zeros_like(exact)
    rounded[torch.from_numpy(inexact)] = True
    assert torch.equal(exact, ~rounded)
    assert bool((value[~exact].abs() < 2**-5).all())
    assert float((halved.double() * 2 - value).abs().max()) == 2.0**-9


def test_nan_is_kept_in_every_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long tensors are halved a piece at a time."""
    monkeypatch.setattr(neuron_e4m3, "_CHUNK", 4)
    codes = torch.arange(24, dtype=torch.uint8).add(64)
    for index in range(24):
        weight = codes.clone()
        weight[index] = nan = (0x7F, 0xFF)[index % 2]
        halved, _, inexact = halve_blocks(weight.view(torch.float8_e4m3fn).view(12, 2), torch.ones(12, 2), (1, 1), 1)
        assert halved.float().isnan().flatten().nonzero().tolist() == [[index]]
        assert halved.view(torch.uint8).flatten()[index] == nan and not len(inexact)


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1024, 1536)])
def test_requantizing_is_dequantizing_then_quantizing(shape: tuple[int, int]) -> None:
    """Against the formula in one expression, which needs neither chunks nor scratch."""
    weight, inverse = quantize_fp8_block(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    weight.view(torch.uint8)[3] = 0
    codes, scale = quantize_chunks(weight.shape, dequantized_chunks(weight, inverse, (128, 128)))
    plain = weight.to(torch.float32) * expand_block_scale(inverse, weight.shape, (128, 128))
    expected = torch.where(plain.abs().amax(1) > 0, plain.abs().amax(1) / NEURON_E4M3_MAX, 1.0)[:, None]
    assert torch.equal(scale, expected)
    assert torch.equal(codes.view(torch.uint8), (plain / expected).to(torch.float8_e4m3fn).view(torch.uint8))
    assert reserved_codes(codes) == 0
