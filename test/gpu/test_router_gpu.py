"""The router product, alone and with the gate, against float64. Needs a Hopper GPU and nvcc."""

from __future__ import annotations

import pytest
import torch
from exact import ROUNDED_ONCE, distance
from exact import normed as exact_norm
from on_hopper import NEEDS_HOPPER, assert_graph_follows
from torch import Tensor

from kimi_k2.kernels.router import router_gemm
from kimi_k2.kernels.router.gate import fused_gate
from kimi_k2.kernels.router.norm_route import add_norm_route
from kimi_k2.kernels.router.router_gemm import router_decode
from kimi_k2.kernels.rowwise.decode import add_norm

pytestmark = NEEDS_HOPPER


def inputs(tokens: int, hidden: int = 7168, experts: int = 384) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    weight = (torch.randn(experts, hidden, device="cuda") * 0.02).bfloat16()
    return x, weight, torch.randn(experts, device="cuda") * 0.05


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64, 200])
@pytest.mark.parametrize(("hidden", "experts"), [(7168, 384), (7168, 256), (512, 64), (8192, 32)])
def test_product_matches_float64(tokens: int, hidden: int, experts: int) -> None:
    torch.manual_seed(tokens)
    x, weight, _ = inputs(tokens, hidden, experts)
    exact = x.double() @ weight.double().T
    got = router_gemm.router_gemm(x, weight)
    assert got.dtype == torch.float32
    assert (got.double() - exact).norm() / exact.norm() < (
        2e-6 if tokens <= 64 else 1e-5
    )  # cuBLAS sums in its own order
    if tokens <= 64:
        assert all(torch.equal(got, router_gemm.router_gemm(x, weight)) for _ in range(3)), "not deterministic"


@pytest.mark.parametrize("tokens", [1, 3, 8, 16, 30, 64])
@pytest.mark.parametrize("experts", [384, 256, 32])
@pytest.mark.parametrize("most", [64, 0])
def test_one_launch_equals_two(tokens: int, experts: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(tokens)
    monkeypatch.setattr(router_gemm, "ONE_LAUNCH_TOKENS", most)
    x, weight, bias = inputs(tokens, 7168, experts)
    wanted = fused_gate(router_gemm.router_gemm(x, weight), bias, 8, True, 2.827)
    for _ in range(4):
        got = router_decode(x, weight, bias, 8, True, 2.827)
        assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1])
    count = torch.tensor([tokens // 2], dtype=torch.int32, device="cuda")
    padded = router_decode(x, weight, bias, 8, True, 2.827, num_valid=count)
    assert not padded[0][tokens // 2 :].any() and not padded[1][tokens // 2 :].any()
    assert torch.equal(padded[1][: tokens // 2], wanted[1][: tokens // 2])


def test_graph_of_dependent_launches_follows_its_inputs() -> None:
    """Launches that overlap by programmatic dependence must still see each other's results."""
    x, weight, bias = inputs(16)

    def run() -> tuple[Tensor, ...]:
        apart = [fused_gate(router_gemm.router_gemm(x * (i + 1), weight), bias, 8) for i in range(8)]
        joined = [router_decode(x * (i + 1), weight, bias, 8) for i in range(8)]
        return tuple(made for both in apart + joined for made in both)

    assert_graph_follows(run, x.normal_, replays=5)


@pytest.mark.parametrize("tokens", [1, 3, 8, 11])
@pytest.mark.parametrize("experts", [384, 256, 32])
def test_norm_and_route(tokens: int, experts: int) -> None:
    (x, weight, _), delta, norm = inputs(tokens, 7168, experts), inputs(tokens)[0] * 3, inputs(1)[0][0]
    bias = torch.randn(experts, device="cuda")
    options = 8, True, 2.827
    for _ in range(3):
        total, normed, indices, weights = add_norm_route(x, delta, norm, 1e-6, weight, bias, *options)
        wanted = add_norm(x, delta, norm, 1e-6)
        assert torch.equal(total, wanted[0])
        assert distance(normed, wanted[1]) < 1e-3
        exact = exact_norm(x.double() + delta.double(), norm)
        assert distance(normed, exact) < ROUNDED_ONCE
        routed = router_decode(wanted[1], weight, bias, *options)
        scores = (exact @ weight.double().T).sigmoid()
        chosen = scores.gather(1, indices)
        best = (scores + bias.double()).topk(8).values.sum(-1)
        assert ((chosen + bias.double()[indices]).sum(-1) > best - 0.02).all()
        assert distance(weights, chosen / chosen.sum(-1, keepdim=True) * 2.827) < 5e-3
        same = (routed[0] == indices).all(-1)
        assert distance(weights[same], routed[1][same]) < 5e-3 if same.any() else tokens < 3
        again = add_norm_route(x, delta, norm, 1e-6, weight, bias, *options)
        assert all(torch.equal(a, b) for a, b in zip(again, (total, normed, indices, weights), strict=True))
