"""Cases of the router GEMM alone and with the gate, beside cuBLAS."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_k2.bench.kernels.gate import SCALE, TOP_K, ours
from kimi_k2.bench.kernels.harness import Case
from kimi_k2.kernels.router.router_gemm import router_decode, router_gemm

TOKENS = (1, 4, 8, 16, 32, 64)
EXPERTS, HIDDEN = 384, 7168


def cublas(x: Tensor, weight: Tensor) -> Tensor:
    """PyTorch's GEMM of bfloat16 with float32 output."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def cases(with_peers: bool) -> Iterator[Case]:
    """Each token count: the GEMM, then the GEMM and the gate; 24 sets of weights are 132 MB."""
    bias = torch.randn(EXPERTS, device="cuda") * 0.03

    operations: dict[str, tuple[int, dict[str, Callable[..., Any]]]] = {
        "router GEMM": (EXPERTS * 4, {"ours": router_gemm, "cuBLAS": cublas}),
        "router GEMM and gate": (
            TOP_K * 8,
            {
                "ours": lambda x, w: router_decode(x, w, bias, TOP_K, True, SCALE, index_dtype=torch.int32),
                "cuBLAS, our gate": lambda x, w: ours(cublas(x, w), bias),
            },
        ),
    }
    weights = [(torch.randn(EXPERTS, HIDDEN, device="cuda") * 0.02).bfloat16() for _ in range(24)]
    for operation, (written, calls) in operations.items():
        for tokens in TOKENS:
            sets = [(torch.randn(tokens, HIDDEN, device="cuda").bfloat16(), weight) for weight in weights]
            chosen = {name: call for name, call in calls.items() if with_peers or name == "ours"}
            ways = {name: [partial(call, *one) for one in sets] for name, call in chosen.items()}
            moved, flops = (EXPERTS + tokens) * HIDDEN * 2 + tokens * written, 2 * tokens * EXPERTS * HIDDEN
            yield Case(operation, f"T={tokens}", ways, moved, flops)
