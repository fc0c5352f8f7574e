"""The experts kernel at the sizes of one rank of both presets against float64, block scales, experts of other ranks."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch
from torch import Tensor

from kimi_k2.nki.kernels.experts import selective_experts
from kimi_k2.nki.kernels.linear import load_weight, project

from .relative_error import relative

HIDDEN, BLOCKS, TOP_K = 7168, 56, 8


class Rank:
    """Weights of a rank's experts: `experts` of width I from `first`, of 384 or fewer in all."""

    def __init__(self, width: int, experts: int, first: int, dtype: str) -> None:
        generator = torch.Generator().manual_seed(width)

        def values(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
            return (torch.randn(*shape, generator=generator) * 40).numpy()

        form = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float8_e4m3": ml_dtypes.float8_e4m3}[dtype]
        self.first, self.width = first, width
        self.weights = cache(self.dequantized)  # as long as the rank is there: hundreds of megabytes
        self.gate_up = np.clip(values(experts, 2 * width, HIDDEN), -240, 240).astype(form)
        self.down = np.clip(values(experts, HIDDEN, width), -240, 240).astype(form)
        self.gate_up_scales = (torch.rand(experts, 2, BLOCKS, generator=generator) * 1e-3 + 1e-4).numpy()
        self.down_scales = (torch.rand(experts, BLOCKS, generator=generator) * 1e-3 + 1e-4).numpy()

    def tiles(self) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float32]], ...]:
        experts = len(self.gate_up)
        gate_up = self.gate_up.reshape(experts, 2 * self.width, BLOCKS, 128).transpose(0, 3, 2, 1)
        down = self.down.transpose(0, 2, 1)
        return np.ascontiguousarray(gate_up), self.gate_up_scales, np.ascontiguousarray(down), self.down_scales

    def dequantized(self, expert: int) -> tuple[Tensor, Tensor]:
        """Dequantized [2I, H] and [H, I], float64."""
        rows = np.repeat(self.gate_up_scales[expert], self.width, 0).repeat(128, 1)
        gate_up = torch.from_numpy(self.gate_up[expert].astype(np.float64) * rows)
        down = self.down[expert].astype(np.float64) * self.down_scales[expert].repeat(128)[:, None]
        return gate_up, torch.from_numpy(down)

    def reference(self, x: Tensor, index: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum over experts held, with weights and activations in `dtype`."""
        out = torch.zeros(x.shape, dtype=torch.float64)
        for token, experts in enumerate(index.tolist()):
            for slot, expert in enumerate(experts):
                if 0 <= expert - self.first < len(self.gate_up):
                    gate_up, down = (w.to(dtype) for w in self.weights(expert - self.first))
                    gate, up = (x[token].to(dtype) @ gate_up.T).chunk(2)
                    part = (torch.nn.functional.silu(gate) * up) @ down.T
                    out[token] += part.double() * weights[token, slot].double()
        return out


def draw(tokens: int, dtype: torch.dtype, chosen_from: int) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, expert numbers and weights."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(chosen_from, generator=generator)[:TOP_K] for _ in range(tokens)]).int()
    return x, index, torch.rand(tokens, TOP_K, generator=generator)


def errors(rank: Rank, tokens: int, dtype: torch.dtype, chosen_from: int, cores: int) -> tuple[float, float]:
    """Relative L2 to float64, of the kernel and of PyTorch in `dtype`."""
    drawn = draw(tokens, dtype, chosen_from)
    got = selective_experts[cores](drawn[0], *rank.tiles(), *drawn[1:], rank.first, chosen_from)
    wanted = rank.reference(*drawn, torch.float64)
    return relative(got, wanted), relative(rank.reference(*drawn, dtype), wanted)


@pytest.mark.parametrize(
    ("width", "cores", "tokens", "stored"),
    [
        *((32, 2, 1, stored) for stored in ("float32", "bfloat16", "float8_e4m3")),
        *((64, 1, 2, stored) for stored in ("float32", "bfloat16", "float8_e4m3")),
        (64, 2, 9, "float32"),
    ],
)
def test_experts_in_float32(width: int, cores: int, tokens: int, stored: str) -> None:
    """Beside narrower weights two BF16 parts of what is multiplied: as near to float64 as in float32."""
    assert errors(Rank(width, 10, 0, stored), tokens, torch.float32, 10, cores)[0] < 1e-5


# A minute of two cores.
MANY_TOKENS = [(64, 16, 12, 0), (32, 64, 12, 0)] if os.environ.get("KIMI_K2_SLOW") else []


@pytest.mark.parametrize(
    ("width", "tokens", "experts", "first"), [(64, 1, 12, 0), (32, 4, 12, 0), (64, 3, 6, 6), *MANY_TOKENS]
)
def test_experts_in_fp8_are_no_farther_than_pytorch(width: int, tokens: int, experts: int, first: int) -> None:
    """Of 12, or of 24 those from `first` on."""
    rank = Rank(width, experts, first, "float8_e4m3")
    error, plain_error = errors(rank, tokens, torch.bfloat16, 24 if first else 12, 2)
    assert error <= plain_error
    assert error < 6e-3


@pytest.mark.parametrize(("width", "tokens", "cores"), [(32, 3, 2), (64, 4, 1)])
@pytest.mark.parametrize("form", ["float32", "float8_e4m3", "bfloat16"])
def test_the_shared_expert_rides_along(width: int, tokens: int, cores: int, form: str) -> None:
    """Its weights with block scales, or (BF16, as in INT4 checkpoints) without; the routed ones are of other ranks."""
    shared, routed = Rank(width, 1, 0, form), Rank(32, 2, 20, form)
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    gate_up, gate_up_scales, down, down_scales = (part[0] for part in shared.tiles())
    if form == "bfloat16":
        shared.gate_up, shared.down = (part / 512 for part in (shared.gate_up, shared.down))
        shared.gate_up_scales, shared.down_scales = (
            np.ones_like(s) for s in (shared.gate_up_scales, shared.down_scales)
        )
        gate_up, _, down, _ = (part[0] for part in shared.tiles())
        gate_up_scales = down_scales = None
    x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    index, weights = torch.arange(8).repeat(tokens, 1).int(), torch.ones(tokens, TOP_K)
    beside = gate_up, gate_up_scales, down, down_scales
    got = selective_experts[cores](x, *routed.tiles(), index, weights, routed.first, 96, *beside)
    one = torch.zeros(tokens, 1).int(), torch.ones(tokens, 1)
    wanted = shared.reference(x, *one, torch.float64)
    assert relative(got, wanted) <= (1e-5 if form == "float32" else relative(shared.reference(x, *one, dtype), wanted))


def test_a_projection_of_more_than_a_bank_of_sums() -> None:
    """Tokens and output rows in groups: 640 rows, 3 chunks of inputs, 40 and 200 tokens, each chunk with its scales."""

    @nki.jit
    def kernel(columns: Any, weight: Any, scales: Any) -> Any:
        out = nl.ndarray((128, 5, columns.shape[2]), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, project(load_weight(columns), load_weight(weight), load_weight(scales), nl.float32))
        return out

    generator = torch.Generator().manual_seed(0)
    weight, scales = torch.randn(128, 3, 640, generator=generator), torch.rand(128, 5, 3, generator=generator)
    for tokens in (40, 200):
        columns = torch.randn(128, 3, tokens, generator=generator)
        by_row = weight.double().view(128, 3, 5, 128)
        wanted = torch.einsum("pkt,pknj,jnk->jnt", columns.double(), by_row, scales.double())
        assert relative(kernel(columns, weight, scales), wanted) < 1e-5
