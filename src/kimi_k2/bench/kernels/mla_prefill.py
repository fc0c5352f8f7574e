"""Cases of MLA prefill attention at the real head sizes, beside FlashAttention 3 where vLLM is."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from kimi_k2.bench.kernels.harness import Case
from kimi_k2.kernels.attention.mla_prefill import NOPE, RANK, ROPE, VALUE, expand, mla_prefill

SHAPES = (
    *((8, 1024, 1024), (8, 2048, 2048), (8, 4096, 4096), (8, 8192, 8192), (8, 32768, 32768), (64, 4096, 4096)),
    *((8, 1024, 16384), (8, 16384, 65536)),
)  # heads, new tokens, slots
SOFTMAX_SCALE = 192**-0.5


def flash_attention_3(nope: Tensor, rope: Tensor, expanded: Tensor, cache: Tensor) -> Callable[[], object]:
    """vLLM's FlashAttention 3 over one sequence, and what joins its keys; queries and values are made before."""
    interface = importlib.import_module("vllm.vllm_flash_attn.flash_attn_interface")
    keys, values = expanded[0].transpose(0, 1).split([NOPE, VALUE], dim=-1)
    new, old = (torch.tensor([0, len(rows)], dtype=torch.int32, device="cuda") for rows in (nope[0], keys))
    rotated = cache[0, :, None, -ROPE:].expand(-1, keys.shape[1], -1)
    q, v = torch.cat((nope[0], rope[0]), dim=-1), values.contiguous()

    def attend() -> object:
        return interface.flash_attn_varlen_func(
            q, torch.cat((keys, rotated), dim=-1), v, max_seqlen_q=len(q), cu_seqlens_q=new, max_seqlen_k=len(v),
            cu_seqlens_k=old, softmax_scale=SOFTMAX_SCALE, causal=True, fa_version=3,
        )  # fmt: skip

    return attend


def calls(heads: int, queries: int, slots: int, with_peers: bool) -> dict[str, Callable[[], object]]:
    """The ways over one sequence whose last `queries` tokens are new, behind the GEMM that makes keys and values."""
    shapes = (1, queries, heads, NOPE + ROPE), (1, slots, RANK + ROPE), (heads, NOPE + VALUE, RANK)
    q, cache, kv_b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    kv_b *= RANK**-0.5
    positions = torch.arange(slots - queries, slots, device="cuda")[None]
    nope, rope = q.split([NOPE, ROPE], dim=-1)
    expanded = expand(cache, kv_b)
    ways: dict[str, Callable[[], object]] = {
        "ours": partial(mla_prefill, nope, rope, expanded, cache, positions, SOFTMAX_SCALE)
    }
    if with_peers and importlib.util.find_spec("vllm") is not None:
        ways["FlashAttention 3"] = flash_attention_3(nope, rope, expanded, cache)
    return ways


def cases(with_peers: bool) -> Iterator[Case]:
    """Each shape, over two sequences."""
    for heads, queries, slots in SHAPES:
        seen = queries * (slots - queries) + queries * (queries + 1) // 2
        flops = 2 * heads * seen * (NOPE + ROPE + VALUE)
        moved = 2 * (queries * heads * (NOPE + ROPE + VALUE) + slots * (heads * (NOPE + VALUE) + ROPE))
        first, second = (calls(heads, queries, slots, with_peers) for _ in range(2))
        ways = {name: [call, second[name]] for name, call in first.items()}
        yield Case("mla_prefill", f"{heads} heads, S={queries}, T={slots}", ways, moved, flops)
