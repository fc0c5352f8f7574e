"""The router kernel at K2's sizes against float64, LNC=1 and 2."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_k2.nki.kernels.router import noaux_tc_router
from kimi_k2.ops.experts import noaux_tc_gate, route

HIDDEN, EXPERTS, SCALE = 7168, 384, 2.827


def draw(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    weight = (torch.randn(EXPERTS, HIDDEN, generator=generator) * 0.02).to(dtype)
    bias = torch.randn(EXPERTS, generator=generator) * 0.1
    return x, weight, bias


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "dtype", "top_k", "norm"),
    [
        *((tokens, dtype, 8, True) for tokens in (1, 4, 16, 64) for dtype in (torch.float32, torch.bfloat16)),
        (4, torch.float32, 4, True),  # fewer experts, and weights as they are
        (64, torch.float32, 8, False),
    ],
)
def test_router_at_real_size(tokens: int, dtype: torch.dtype, top_k: int, norm: bool, cores: int) -> None:
    x, weight, bias = draw(tokens, dtype)
    index, weights = noaux_tc_router[cores](x, weight.T.contiguous(), bias[None], SCALE, norm, top_k)
    wanted_index, wanted = noaux_tc_gate(
        x.double() @ weight.double().T, bias.double(), top_k, norm_topk_prob=norm, routed_scaling_factor=SCALE
    )
    assert torch.equal(torch.from_numpy(index).long(), wanted_index)
    torch.testing.assert_close(torch.from_numpy(weights).double(), wanted, rtol=1e-6, atol=0)


def test_equal_scores_go_to_the_lower_index() -> None:
    x, weight, bias = draw(4, torch.float32)
    weight[200:] = weight[:184]  # every expert from 200 on repeats an earlier one
    bias[200:] = bias[:184]
    index, _ = noaux_tc_router(x, weight.T.contiguous(), bias[None], SCALE)
    assert torch.equal(torch.from_numpy(index).long(), route(x, weight, bias, 8)[0])
