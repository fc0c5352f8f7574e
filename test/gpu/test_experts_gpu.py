"""What holds for the experts of every format: a rank's share of them, and graphs. Needs a GPU, most of it a Hopper."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from on_hopper import HOPPER, assert_graph_follows, distance
from torch import Tensor

from kimi_k2.bench.kernels.expert_formats import random_fp8, random_int4, random_routing
from kimi_k2.kernels.experts.bf16 import moe_bf16
from kimi_k2.kernels.experts.fp8 import moe_fp8
from kimi_k2.kernels.experts.fp8_decode import moe_decode
from kimi_k2.kernels.experts.w4a16 import moe_w4a16

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
EXPERTS, INTER, HIDDEN = 32, 256, 1024


def made(kind: str) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """An operation and the weights that it takes."""
    if kind == "bf16":
        shapes = (EXPERTS, 2 * INTER, HIDDEN), (EXPERTS, HIDDEN, INTER)
        return moe_bf16, tuple((torch.randn(*one, device="cuda") * 0.03).bfloat16() for one in shapes)
    if not HOPPER:
        pytest.skip("needs a Hopper GPU")
    if kind == "int4":
        return moe_w4a16, tuple(one for one in random_int4(EXPERTS, INTER, HIDDEN) if one is not None)
    return moe_decode if kind == "decode" else moe_fp8, random_fp8(EXPERTS, INTER, HIDDEN)


@pytest.mark.parametrize(("kind", "tokens"), [("fp8", 40), ("int4", 40), ("bf16", 40), ("decode", 4)])
def test_expert_parallel_ranks_sum_to_the_whole(kind: str, tokens: int) -> None:
    operation, weights = made(kind)
    routing = random_routing(tokens, 8, EXPERTS)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    total = torch.zeros(tokens, HIDDEN, device="cuda")
    for rank in range(2):
        held = slice(16 * rank, 16 * rank + 16)
        mine = torch.full((EXPERTS,), -1, dtype=torch.int32, device="cuda")
        mine[held] = torch.arange(16, device="cuda", dtype=torch.int32)
        total += operation(x, *(one[held].contiguous() for one in weights), *routing, mine).float()
    assert distance(total, operation(x, *weights, *routing).double()) < 5e-3


@pytest.mark.parametrize(
    ("kind", "tokens", "choice"),
    [
        ("fp8", 4, None), ("fp8", 300, None), ("fp8", 2100, [0, 32, 1, 1, 2]), ("int4", 4, None), ("int4", 30, None),
        ("int4", 300, [0, 32, 1, 1, 4]), ("int4", 1000, [0, 128, 1, 1, 4]), ("bf16", 33, None), ("decode", 2, None),
    ],
)  # fmt: skip
def test_graph_replay_follows_its_inputs(kind: str, tokens: int, choice: list[int] | None) -> None:
    """Also where other launches sort before and sum after: nothing of the routing before is left in any scratch."""
    operation, weights = made(kind)
    if choice is not None:
        operation = partial(operation, choice=choice)
    x, routing = torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), random_routing(tokens, 8, EXPERTS)

    def refresh() -> None:
        for old, new in zip((x, *routing), (torch.randn_like(x), *random_routing(tokens, 8, EXPERTS)), strict=True):
            old.copy_(new)

    assert_graph_follows(lambda: (operation(x, *weights, *routing),), refresh)
