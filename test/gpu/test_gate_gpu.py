"""The fused gate against the plain operation in float64. Needs a Hopper GPU and nvcc."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from on_hopper import NEEDS_HOPPER
from torch import Tensor

from kimi_k2.kernels.router import gate
from kimi_k2.kernels.router.gate import fused_gate
from kimi_k2.ops.experts import noaux_tc_gate

pytestmark = NEEDS_HOPPER
# Twice the spacing of float32 just below 1, and the special-function unit's error.
ROUNDING = 5e-7


@pytest.fixture(autouse=True, params=[2**40, 0], ids=["warp", "packed"])
def _strategy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens from which on four share a warp."""
    monkeypatch.setattr(gate, "PACKED_TOKENS", request.param)


def assert_gate(logits: Tensor, bias: Tensor, top_k: int, scale: float = 2.827, normalize: bool = True) -> None:
    """Against the plain operation in float64, which gives ties to the lowest index."""
    indices, weights = fused_gate(logits, bias, top_k, normalize, scale)
    options = {"norm_topk_prob": normalize, "routed_scaling_factor": scale}
    wanted, wanted_weights = noaux_tc_gate(logits.double(), bias.double(), top_k, **options)  # type: ignore[arg-type]
    choice = logits.double().sigmoid() + bias.double()
    # At each rank the score is that of float64; so sets differ only where scores tie within rounding.
    assert (choice.gather(1, indices) - choice.gather(1, wanted)).abs().max() < ROUNDING
    assert (indices.sort(-1).values.diff(dim=-1) > 0).all(), "an expert twice"
    same = (indices == wanted).all(-1)
    assert same.double().mean() > 0.99
    torch.testing.assert_close(weights[same].double(), wanted_weights[same], rtol=3e-6, atol=0)


SHAPES = [(1, 384), (3, 384), (64, 384), (513, 384), (4097, 384), (1, 256), (65, 256), (4099, 256)]
ROWS = [
    *((*shape, top_k, 2.827) for shape, top_k in product(SHAPES, (1, 6, 8, 9, 16))),
    # Sizes of SGLang's own test; 1 is without its `apply_routed_scaling_factor_on_output`.
    *((65536, 384, top_k, scale) for top_k, scale in product((6, 8), (2.872, 1.0))),
    *((200, experts, min(8, experts), 2.827) for experts in (4, 8, 60, 64, 128, 160, 300, 512)),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "experts", "top_k", "scale"), ROWS)
def test_matches_float64(tokens: int, experts: int, top_k: int, scale: float) -> None:
    torch.manual_seed(tokens + experts + top_k)
    logits, bias = torch.randn(tokens, experts, device="cuda") * 1.5 - 2, torch.randn(experts, device="cuda") * 0.1
    assert_gate(logits, bias, top_k, scale)
    assert_gate(logits, bias, top_k, scale, normalize=False)


@pytest.mark.parametrize("experts", gate.PACKED_EXPERTS)
@pytest.mark.parametrize("top_k", [8, 16])
@pytest.mark.parametrize("warps", [1, 3, 8])
def test_blocks_give_the_same_bits_and_either_index_dtype(
    experts: int, top_k: int, warps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, bias = torch.randn(3001, experts, device="cuda"), torch.randn(experts, device="cuda")
    torch.cuda.synchronize()  # the bias is a weight, which is read before the launch ahead has ended
    found = fused_gate(logits, bias, top_k, index_dtype=torch.int32)
    monkeypatch.setattr(gate, "PACKED_TOKENS", 2**40)
    monkeypatch.setattr(gate, "warps_a_block", lambda _: warps)
    by_warps = fused_gate(logits, bias, top_k)
    assert torch.equal(by_warps[0], found[0].long()) and torch.equal(by_warps[1], found[1])


@pytest.mark.parametrize("levels", [1, 2, 3, 5, 17])
def test_ties_go_to_the_lowest_index(levels: int) -> None:
    """Few distinct values: every row has ties at the border, and many more candidates than the lists hold."""
    torch.manual_seed(levels)
    logits, bias = torch.randint(0, levels, (501, 384), device="cuda").float(), torch.zeros(384, device="cuda")
    indices, weights = fused_gate(logits, bias, 8)
    wanted, wanted_weights = noaux_tc_gate(logits.double(), bias.double(), 8)
    assert torch.equal(indices, wanted)
    torch.testing.assert_close(weights.double(), wanted_weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("scale", "shift"), [(30.0, 0.0), (5.0, -40.0), (1.0, 20.0)])
def test_extreme_logits(scale: float, shift: float) -> None:
    """Scores of 0 and 1 tie: which of them is chosen is open."""
    logits = torch.randn(257, 384, device="cuda") * scale + shift
    indices, weights = fused_gate(logits, torch.zeros(384, device="cuda"), 8)
    scores = logits.double().sigmoid()
    chosen = scores.gather(1, indices)
    assert (scores.topk(8).values - chosen).abs().max() < ROUNDING
    wanted = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    torch.testing.assert_close(weights.double(), wanted, rtol=1e-5, atol=1e-9)


def test_nan_comes_last_and_infinity_is_a_limit() -> None:
    logits = torch.randn(7, 384, device="cuda")
    bias = torch.randn(384, device="cuda") * 0.1
    logits[0, 5] = float("nan")
    logits[1] = float("nan")
    logits[2] = float("nan")
    logits[2, [300, 20, 7]] = torch.tensor([1.0, 2.0, 3.0], device="cuda")
    logits[3, 9] = float("inf")
    logits[4, :] = -float("inf")
    indices, weights = fused_gate(logits, bias.zero_(), 8)
    assert not weights.isnan().any()
    assert torch.equal(indices[0], logits[0].nan_to_num(-1e9).topk(8).indices)
    assert torch.equal(indices[1], torch.arange(8, device="cuda")) and not weights[1].any()
    assert indices[2].tolist() == [7, 20, 300, 0, 1, 2, 3, 4] and not weights[2, 3:].any()
    assert indices[3, 0] == 9
    assert torch.equal(indices[4], torch.arange(8, device="cuda")) and not weights[4].any()


def test_padding_has_index_and_weight_zero() -> None:
    logits, bias = torch.randn(1003, 384, device="cuda"), torch.randn(384, device="cuda") * 0.1
    logits[900] = float("nan")
    for valid in (0, 1, 501, 1003, 5000):
        count = torch.tensor([valid], dtype=torch.int32, device="cuda")
        indices, weights = fused_gate(logits, bias, 8, num_valid=count)
        whole = fused_gate(logits, bias, 8)
        assert torch.equal(indices[:valid], whole[0][:valid]) and torch.equal(weights[:valid], whole[1][:valid])
        assert not indices[valid:].any() and not weights[valid:].any()


@pytest.mark.memory(10)
def test_offsets_beyond_32_bits() -> None:
    tokens = 2**31 // 384 + 1000
    logits, bias = torch.empty(tokens, 384, device="cuda").normal_(), torch.randn(384, device="cuda") * 0.1
    indices, weights = fused_gate(logits, bias, 8)
    last = fused_gate(logits[-1003:].clone(), bias, 8)
    assert torch.equal(indices[-1003:], last[0])
    assert torch.equal(weights[-1003:], last[1])
