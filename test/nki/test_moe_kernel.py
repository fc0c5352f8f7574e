"""The MoE layer's kernel at the sizes of one rank: the router's choice, routed and shared experts, against float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kimi_k2.nki.kernels.moe import moe_decode
from kimi_k2.ops.router import noaux_tc_gate

from .test_experts_kernel import HIDDEN, Rank

SCALING, EPS, EXPERTS = 2.827, 1e-6, 96


@pytest.mark.parametrize(("width", "first", "held", "tokens", "cores"), [(32, 0, 96, 2, 2), (64, 40, 12, 4, 2)])
@pytest.mark.parametrize("form", ["float32", "float8_e4m3"])
@pytest.mark.parametrize("early", [False, True])
def test_layer_of_one_rank(width: int, first: int, held: int, tokens: int, cores: int, form: str, early: bool) -> None:
    generator = torch.Generator().manual_seed(width)
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    routed, shared = Rank(width, held, first, form), Rank(32, 1, 0, form)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype)
    gain = (1 + 0.1 * torch.randn(HIDDEN, generator=generator)).to(dtype)
    gate = (torch.randn(EXPERTS, HIDDEN, generator=generator) * 0.02).to(dtype)
    bias = torch.randn(EXPERTS, generator=generator) * 0.1
    tiles = gate.view(EXPERTS, HIDDEN // 128, 128).permute(2, 1, 0).contiguous()
    ours = (part[0] for part in shared.tiles())
    # An early router's sums have not been through the norm, but for its weight.
    router = None if early else tiles
    sums = ((x.double() * gain.double()) @ gate.double().T).float() if early else None
    rest = (first, EXPERTS, SCALING, EPS, sums)
    got = moe_decode[cores](x, gain, router, bias[None], *routed.tiles(), *ours, *rest)
    result = torch.from_numpy(got).view(tokens, HIDDEN).double()

    def reference(kind: torch.dtype) -> torch.Tensor:
        wide = torch.promote_types(kind, torch.float32)
        normed = x.to(wide) * torch.rsqrt(x.to(wide).square().mean(-1, keepdim=True) + EPS)
        normed = normed.to(kind) * gain.to(kind)
        logits = (normed @ gate.to(kind).T).to(wide)
        index, weights = noaux_tc_gate(logits, bias.to(wide), 8, routed_scaling_factor=SCALING)
        one = torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1)
        return routed.reference(normed, index, weights, kind) + shared.reference(normed, *one, kind)

    exact = reference(torch.float64)
    error = (result - exact).norm().item()
    if form == "float32":
        assert error < 1e-5 * exact.norm().item()
    else:
        assert error <= (reference(torch.bfloat16) - exact).norm().item()
    assert np.isfinite(got).all()
