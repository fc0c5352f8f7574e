"""Cases of MLA prefill attention at the real head sizes, beside FlashAttention 3 where vLLM is, and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.bench.kernels.harness import Case
from kimi_k2.kernels.attention import flash_prefill
from kimi_k2.kernels.attention.mla_prefill import NOPE, RANK, ROPE, VALUE, run
from kimi_k2.ops.mla import Ragged

SHAPES = (
    *((8, 1024, 1024), (8, 2048, 2048), (8, 4096, 4096), (8, 8192, 8192), (8, 32768, 32768), (64, 4096, 4096)),
    *((8, 1024, 16384), (8, 16384, 65536)),
)  # heads, new tokens, slots
SOFTMAX_SCALE = 192**-0.5


def expand(cache: Tensor, kv_b: Tensor) -> Tensor:
    """Keys without position and values of all heads by one GEMM, [B, H, T, 256]."""
    return torch.matmul(cache[..., :RANK].unsqueeze(1), kv_b.mT)


def padded(nope: Tensor, rope: Tensor, expanded: Tensor, cache: Tensor) -> Tensor:
    """The same where no tokens are cached before: values padded to the keys' width, as PyTorch's operation wants."""
    keys, values = expanded.split([NOPE, VALUE], dim=-1)
    rotated = cache[:, None, :, -ROPE:].expand(-1, keys.shape[1], -1, -1)
    q = torch.cat((nope, rope), dim=-1).transpose(1, 2)
    wide = F.pad(values, (0, ROPE))
    return F.scaled_dot_product_attention(
        q, torch.cat((keys, rotated), dim=-1), wide, is_causal=True, scale=SOFTMAX_SCALE
    )


def calls(heads: int, queries: int, slots: int, with_peers: bool) -> dict[str, Callable[[], object]]:
    """The ways over one sequence whose last `queries` tokens are new: inputs as the model leaves them.

    FlashAttention 3 alone, with keys and values made before it, and the GEMM that makes these.
    """
    shapes = (1, queries, heads, NOPE + ROPE), (1, slots, RANK + ROPE), (heads, NOPE + VALUE, RANK)
    q, cache, kv_b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    kv_b *= RANK**-0.5
    positions = torch.arange(slots - queries, slots, device="cuda")[None]
    nope, rope = q.split([NOPE, ROPE], dim=-1)
    expanded = expand(cache, kv_b)
    ways: dict[str, Callable[[], object]] = {
        "ours": partial(run, nope, rope, expanded, cache, positions, SOFTMAX_SCALE)
    }
    if flash_prefill.flash_attention() is not None:
        ready = flash_prefill.join(nope[0], rope[0]), *flash_prefill.keys_and_values(cache[0], kv_b)
        whole = nope, rope, cache, kv_b, positions, SOFTMAX_SCALE
        new, old = (Ragged((n,), torch.tensor([0, n], dtype=torch.int32, device="cuda")) for n in (queries, slots))
        ways["FlashAttention 3 alone"] = partial(flash_prefill.attend_ragged, *ready, new, old, SOFTMAX_SCALE)
        ways["with keys and values"] = partial(flash_prefill.mla_naive_attention, *whole)
        ways["one GEMM alone"] = partial(expand, cache, kv_b)
    if with_peers and queries == slots and queries <= 8192:
        ways["PyTorch SDPA"] = partial(padded, nope, rope, expanded, cache)
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
