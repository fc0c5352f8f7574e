"""Routed experts beside each token's own sum in float64."""

import pytest
import torch
from tiny import TINY, application


@torch.inference_mode()
@pytest.mark.parametrize("block_size", [1, 3, 4, 96])
def test_blocks_hold_the_worst_distribution(one_rank, block_size):
    """Each of 24 experts gets 4 rows: with blocks of 3 rows no distribution of these choices needs more blocks."""
    from src.moe import KimiK2Experts

    experts, count = KimiK2Experts(application(TINY).config), TINY["n_routed_experts"]
    experts.block_size = block_size
    up, down = experts.gate_up_proj.weight, experts.down_proj.weight
    for weight in (up, down):
        weight.data.normal_(0, weight.shape[1] ** -0.5)
    tokens, weights = torch.randn(count, TINY["hidden_size"]), torch.rand(count, 4) + 0.5
    chosen = (torch.arange(count)[:, None] + 6 * torch.arange(4)) % count
    gate, linear = torch.einsum("th,tchi->tci", tokens.double(), up.double()[chosen]).chunk(2, dim=-1)
    each = torch.einsum("tci,tcih->tch", torch.nn.functional.silu(gate) * linear, down.double()[chosen])
    expected = (each * weights.double().unsqueeze(-1)).sum(dim=1)
    found = experts.forward_blocks(tokens, chosen, weights)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
