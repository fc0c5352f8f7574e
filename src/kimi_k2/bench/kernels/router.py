"""Time of the router GEMM alone and with the gate, beside cuBLAS and beside two launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_k2.bench.kernels.gate import SCALE, TOP_K, ours
from kimi_k2.bench.kernels.harness import Row, graph_median
from kimi_k2.kernels.router.router_gemm import router_decode, router_gemm

TOKENS = (1, 4, 8, 16, 32, 64)
EXPERTS, HIDDEN = 384, 7168


def cublas(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's GEMM of bfloat16 with float32 output."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def time_calls(call: Callable[..., Any], tokens: int) -> float:
    """Median microseconds of replays over 24 sets of tokens and weights: 132 MB of weights."""
    sets = []
    for _ in range(24):
        weight = (torch.randn(EXPERTS, HIDDEN, device="cuda") * 0.02).bfloat16()
        sets.append((torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), weight))
    return graph_median([partial(call, *one) for one in sets])


def rows(with_peers: bool = True) -> Iterator[Row]:
    """Each token count: the GEMM, then the GEMM and the gate."""
    bias = torch.randn(EXPERTS, device="cuda") * 0.03
    product: dict[str, Callable[..., Any]] = {"ours": router_gemm, "cuBLAS": cublas}

    def routed_in(launches: int) -> Callable[..., Any]:
        return lambda x, w: router_decode(x, w, bias, TOP_K, True, SCALE, index_dtype=torch.int32, launches=launches)

    routed: dict[str, Callable[..., Any]] = {
        "ours": routed_in(0),
        "ours, one launch": routed_in(1),
        "ours, two launches": routed_in(2),
        "cuBLAS, our gate": lambda x, w: ours(cublas(x, w), bias),
    }
    for operation, calls in (("router GEMM", product), ("router GEMM and gate", routed)):
        for tokens in TOKENS:
            moved = (EXPERTS + tokens) * HIDDEN * 2 + tokens * (EXPERTS * 4 if calls is product else TOP_K * 8)
            for name, call in calls.items():
                if with_peers or name == "ours":
                    flops = 2 * tokens * EXPERTS * HIDDEN
                    yield Row(operation, f"T={tokens}", name, time_calls(call, tokens), moved, flops)
