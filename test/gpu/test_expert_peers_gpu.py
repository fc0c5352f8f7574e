"""The comparison of routed experts with peers at real sizes: results near float64, and a wrong one is seen."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from e4m3 import rounded
from on_hopper import NEEDS_HOPPER
from torch import Tensor
from torch.nn.functional import silu

from kimi_k2.bench.kernels.expert_formats import FORMATS, Case, RandomExperts, draw_inputs
from kimi_k2.bench.kernels.expert_peers import Peer, peers
from kimi_k2.bench.kernels.experts import CHECKED_TOKENS, compare
from kimi_k2.bench.kernels.mla_cases import relative
from kimi_k2.bench.kernels.routing import Routing
from kimi_k2.errors import KernelError

pytestmark = NEEDS_HOPPER
CASE = Case(48, 256, 8)
# FP8 of ours rounds tokens and the intermediate to e4m3, of 4 tokens neither; the others compute in BF16.
LARGEST = {"FP8": 0.05, "INT4": 6e-3, "BF16": 6e-3}


@pytest.fixture(scope="module", params=list(FORMATS))
def experts(request: pytest.FixtureRequest) -> RandomExperts:
    torch.manual_seed(0)
    return FORMATS[request.param](CASE.experts, CASE.inter)


@pytest.mark.parametrize("routing", ["uniform", "zipf:1.5", "same"])
@pytest.mark.parametrize("tokens", [1, 8, 700])
@pytest.mark.memory(7)
def test_ours_is_near_float64(experts: RandomExperts, tokens: int, routing: str) -> None:
    found = compare(experts, [], CASE, "TP8", routing, tokens, replays=1)
    assert found.errors["ours"] < LARGEST[experts.name] and found.microseconds["ours"] > 0
    assert found.experts == 8 if routing == "same" or tokens == 1 else found.experts > 8


def from_float64(experts: RandomExperts, tokens: int) -> float:
    """How far rounding alone, of tokens and intermediate, brings the result of `compare`'s checked tokens."""
    x, indices, weights = draw_inputs(CASE, Routing.parse("uniform"), tokens, tokens, experts.bytes_each)[0]
    x, out = x[:CHECKED_TOKENS], torch.zeros(x[:CHECKED_TOKENS].shape, dtype=torch.float64, device=x.device)
    for token, held in enumerate(rounded(x)):
        for expert, weight in zip(indices[token].tolist(), weights[token].double(), strict=True):
            gate_up, down = experts.dequantized(expert)
            gate, up = (gate_up @ held).chunk(2)
            out[token] += weight * (down @ rounded(silu(gate) * up))
    return relative(out, experts.reference(x, indices[: len(x)], weights[: len(x)]))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("tokens", [1, 600])
def test_peers_are_near_float64(experts: RandomExperts, tokens: int) -> None:
    known = list(peers(experts))
    found = compare(experts, known, CASE, "TP8", "uniform", tokens, replays=1)
    timed = [peer.name for peer in known if peer.call is not None and tokens >= peer.least]
    assert timed and list(found.microseconds) == ["ours", *timed], found.absent
    assert found.errors.pop("ours") < LARGEST[experts.name]
    # vLLM's Triton kernels add something of their own to it: 1.14 times with one token, 1.10 with 600; DeepGEMM 1.01.
    largest = 1.2 * from_float64(experts, tokens) if experts.name == "FP8" else LARGEST[experts.name]
    assert max(found.errors.values()) < largest


def test_a_wrong_result_is_refused(experts: RandomExperts) -> None:
    right = experts.ours(8, CASE.top_k)

    def swapped(x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return right(x, indices.flip(0), weights)

    with pytest.raises(KernelError, match=r"wrong: .* from float64"):
        compare(experts, [Peer("wrong", swapped)], CASE, "TP8", "uniform", 8, replays=1)
