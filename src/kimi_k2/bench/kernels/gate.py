"""Cases of the fused gate: ours, torch.compile of the plain operation, SGLang's and vLLM's kernel where installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_k2.bench.kernels.harness import Case
from kimi_k2.kernels.router.gate import fused_gate

TOKENS = (1, 8, 64, 512, 4096, 32768, 65536)
EXPERTS = (384, 256)
TOP_K = 8
SCALE = 2.827


def random_logits(tokens: int, experts: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Logits of mean -2 and deviation 1, and a bias of deviation 0.03: the spread at which the bias matters."""
    return torch.randn(tokens, experts, device=device) - 2, torch.randn(experts, device=device) * 0.03


def plain_gate(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """What torch.compile is given: `noaux_tc_gate` with torch.topk, whose order of ties is open."""
    scores = logits.sigmoid()
    indices = (scores + bias).topk(TOP_K, dim=-1, sorted=True).indices
    weights = scores.gather(1, indices)
    return indices.int(), weights / (weights.sum(-1, keepdim=True) + 1e-20) * SCALE


def ours(logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """`fused_gate` as Kimi-K2 calls it, int32 indices."""
    return fused_gate(logits, bias, TOP_K, True, SCALE, index_dtype=torch.int32)


def peers(experts: int) -> Iterator[tuple[str, Callable[[Tensor, Tensor], Any]]]:
    """(name, call) of each peer that can be imported here."""
    yield "torch.compile", torch.compile(plain_gate, dynamic=False)
    if importlib.util.find_spec("sgl_kernel"):
        sgl = importlib.import_module("sgl_kernel")
        if experts == 384 and hasattr(sgl, "kimi_k2_moe_fused_gate"):
            yield "sgl_kernel", lambda z, b: sgl.kimi_k2_moe_fused_gate(z, b, TOP_K, True, SCALE, True)
        elif hasattr(sgl, "moe_fused_gate"):
            yield "sgl_kernel", lambda z, b: sgl.moe_fused_gate(z, b, 1, 1, TOP_K, 0, SCALE, True)
    if importlib.util.find_spec("vllm"):
        vllm = importlib.import_module("vllm._custom_ops")
        if hasattr(vllm, "grouped_topk"):
            yield "vllm", lambda z, b: vllm.grouped_topk(z, 1, 1, TOP_K, True, SCALE, b, 1)


def cases(with_peers: bool) -> Iterator[Case]:
    """Each shape, over sets of logits that together are larger than the L2, at most 200 of them."""
    for experts in EXPERTS:
        calls = {"ours": ours, **(dict(peers(experts)) if with_peers else {})}
        for tokens in TOKENS:
            sets = [random_logits(tokens, experts) for _ in range(max(3, min(200, 2**28 // (tokens * experts * 4))))]
            ways = {name: [partial(call, *one) for one in sets] for name, call in calls.items()}
            moved = tokens * (experts * 4 + TOP_K * 8) + experts * 4
            yield Case("gate", f"{experts} experts, T={tokens}", ways, moved)
