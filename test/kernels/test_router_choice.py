"""Which launches `router_decode` makes, recorded in place of the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kimi_k2.errors import KernelError
from kimi_k2.kernels.router import gate as fused_gate
from kimi_k2.kernels.router import router_gemm


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, bool]]]:
    """Runs the operation's body on CPU tensors; returns each launch with whether its logits are the right ones."""
    made: list[tuple[str, bool]] = []
    scratch = torch.full((64, 384), float("nan"))

    def product(x: torch.Tensor, weight: torch.Tensor, logits: torch.Tensor, gate: Any, inverse: Any) -> None:
        made.append(("product with gate" if gate is not None else "product", logits is scratch))

    def run(tokens: int, launches: int = 0, experts: int = 384, sm_count: int = 132) -> list[tuple[str, bool]]:
        made.clear()
        monkeypatch.setattr(fused_gate, "hopper", lambda *_: ("NVIDIA H200", sm_count))
        monkeypatch.setattr(router_gemm, "absent_logits", lambda _: scratch)
        monkeypatch.setattr(router_gemm, "launch_router", product)
        monkeypatch.setattr(router_gemm, "launch_gate", lambda gate, _: made.append(("gate", bool(gate.logits))))
        x, weight = torch.zeros(tokens, 512, dtype=torch.bfloat16), torch.zeros(experts, 512, dtype=torch.bfloat16)
        body = router_gemm.router_decode.function
        indices, weights = body(x, weight, torch.zeros(experts), 8, launches=launches)
        assert indices.shape == weights.shape == (tokens, 8)
        return list(made)

    return run


ONE, TWO = [("product with gate", True)], [("product", False), ("gate", True)]


def test_few_tokens_take_one_launch(decode: Callable[..., list[tuple[str, bool]]]) -> None:
    assert decode(1) == decode(router_gemm.ONE_LAUNCH_TOKENS) == ONE
    assert decode(router_gemm.ONE_LAUNCH_TOKENS + 1) == decode(64) == TWO
    assert decode(0) == []


def test_launches_can_be_pinned(decode: Callable[..., list[tuple[str, bool]]]) -> None:
    assert decode(64, launches=1) == ONE
    assert decode(1, launches=2) == TWO


def test_blocks_that_could_not_wait_for_each_other_take_two(decode: Callable[..., list[tuple[str, bool]]]) -> None:
    assert decode(1, sm_count=60) == TWO
    assert decode(1, experts=32, sm_count=60) == ONE
    with pytest.raises(KernelError, match="whole GPU"):
        decode(1, launches=1, sm_count=60)
