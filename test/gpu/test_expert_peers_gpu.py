"""The comparison of routed experts with peers at real sizes: results near float64."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from on_hopper import NEEDS_HOPPER

from kimi_k2.bench.kernels.expert_formats import FORMATS, RandomExperts, Shape, draw_inputs, drawn
from kimi_k2.bench.kernels.expert_peers import PEERS, Peer, peers
from kimi_k2.bench.kernels.experts import Beside, case_of, errors_of
from kimi_k2.bench.kernels.harness import Captures
from kimi_k2.bench.kernels.routing import Routing

pytestmark = NEEDS_HOPPER
SHAPE = Shape(48, 256, 8)
# FP8 rounds tokens and the intermediate to e4m3, ours of 4 tokens neither; the others compute in BF16.
LARGEST = {name: 0.05 if name == "FP8" else 6e-3 for name in FORMATS}


@pytest.fixture(scope="module", params=FORMATS)
def experts(request: pytest.FixtureRequest) -> RandomExperts:
    torch.manual_seed(0)
    return drawn(request.param, SHAPE.experts, SHAPE.inter)


def errors(experts: RandomExperts, tokens: int, routing: str = "uniform", *known: Peer) -> dict[str, float]:
    inputs = draw_inputs(SHAPE, Routing.parse(routing), tokens, tokens, experts.bytes_each)[0]
    calls = {"ours": experts.ours()} | {one.name: one.call for one in known if one.takes(tokens, 8)}
    return errors_of(calls, experts, inputs, pytest.fail)


@pytest.mark.parametrize("routing", ["uniform", "zipf:1.5", "same"])
@pytest.mark.parametrize("tokens", [1, 8, 700])
@pytest.mark.memory(7)
def test_ours_is_near_float64(experts: RandomExperts, tokens: int, routing: str) -> None:
    assert errors(experts, tokens, routing)["ours"] < LARGEST[experts.name]
    case = case_of(experts.name, experts, SHAPE.top_k, tokens, routing, Beside([], Captures(), pytest.fail))
    (row,) = case.rows(1, pytest.fail)
    reached = (case.bytes - 4 * tokens * 7168) / experts.bytes_each
    assert row.microseconds > 0 and (reached == 8 if routing == "same" or tokens == 1 else reached > 8)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize("tokens", [1, 600])
def test_peers_are_near_float64(experts: RandomExperts, tokens: int) -> None:
    known = list(peers(experts, print))
    if experts.name not in PEERS:
        pytest.skip("has none")
    found = errors(experts, tokens, "uniform", *known)
    timed = [peer.name for peer in known if tokens >= peer.least]
    assert timed and list(found) == ["ours", *timed]
    assert found.pop("ours") < LARGEST[experts.name]
    assert max(found.values()) < LARGEST[experts.name]
