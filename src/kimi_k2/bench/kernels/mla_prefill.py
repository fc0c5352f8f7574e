"""Time of MLA prefill attention at the real head sizes, beside FlashAttention 3 where vLLM is, and PyTorch's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.bench.kernels.harness import graph_median
from kimi_k2.bench.kernels.row import Row
from kimi_k2.kernels.attention import flash_prefill
from kimi_k2.kernels.attention.mla_prefill import LAUNCH, NOPE, ROPE, VALUE, run

SHAPES = (
    *((8, 1024, 1024), (8, 2048, 2048), (8, 4096, 4096), (8, 8192, 8192), (8, 32768, 32768), (64, 4096, 4096)),
    *((8, 1024, 16384), (8, 16384, 65536)),
)  # heads, new tokens, slots
SOFTMAX_SCALE = 192**-0.5
LAUNCHES = ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3), (128, 32, 8, 4))


def random_inputs(heads: int, queries: int, slots: int) -> tuple[Tensor, ...]:
    """One sequence whose last `queries` tokens are new."""
    shapes = (1, queries, heads, NOPE), (1, queries, heads, ROPE), (1, heads, slots, NOPE + VALUE), (1, slots, 576)
    tensors = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    return (*tensors, torch.arange(slots - queries, slots, device="cuda")[None])


def call(one: tuple[Tensor, ...], launch: tuple[int, int, int, int]) -> Tensor:
    """`mla_prefill` with a launch of its own."""
    nope, rope, expanded, cache, positions = one
    return run(nope, rope, expanded, cache, positions, SOFTMAX_SCALE, launch)


def padded(nope: Tensor, rope: Tensor, expanded: Tensor, cache: Tensor) -> Tensor:
    """The same where no tokens are cached before: values padded to the keys' width, as PyTorch's operation wants."""
    keys, values = expanded.split([NOPE, VALUE], dim=-1)
    rotated = cache[:, None, :, -ROPE:].expand(-1, keys.shape[1], -1, -1)
    q = torch.cat((nope, rope), dim=-1).transpose(1, 2)
    wide = F.pad(values, (0, ROPE))
    return F.scaled_dot_product_attention(
        q, torch.cat((keys, rotated), dim=-1), wide, is_causal=True, scale=SOFTMAX_SCALE
    )


def flash(one: tuple[Tensor, ...]) -> Tensor:
    """FlashAttention 3 with what it needs joined before, as the table's entry."""
    nope, rope, expanded, cache, _ = one
    keys, values = expanded.transpose(1, 2).split([NOPE, VALUE], dim=-1)
    joined = flash_prefill.join(nope, rope), flash_prefill.join(keys, cache[..., -ROPE:])
    return flash_prefill.attend(*joined, values, SOFTMAX_SCALE)


def rows(with_peers: bool = True, sweep: bool = False) -> Iterator[Row]:
    """Each shape; `sweep` adds other launches."""
    for heads, queries, slots in SHAPES:
        seen = queries * (slots - queries) + queries * (queries + 1) // 2
        flops = 2 * heads * seen * (NOPE + ROPE + VALUE)
        moved = 2 * (queries * heads * (NOPE + ROPE + VALUE) + slots * (heads * (NOPE + VALUE) + ROPE))
        inputs = [random_inputs(heads, queries, slots) for _ in range(2)]
        case = f"{heads} heads, S={queries}, T={slots}"
        launches = {"ours": LAUNCH} | ({str(launch): launch for launch in LAUNCHES} if sweep else {})
        for name, launch in launches.items():
            calls = [partial(call, one, launch) for one in inputs]
            yield Row("mla_prefill", case, name, graph_median(calls), moved, flops)
        if flash_prefill.flash_attention() is not None:
            calls = [partial(flash, one) for one in inputs]
            yield Row("mla_prefill", case, "FlashAttention 3", graph_median(calls), moved, flops)
        if with_peers and queries == slots and queries <= 8192:
            calls = [partial(padded, *one[:4]) for one in inputs]
            yield Row("mla_prefill", case, "PyTorch SDPA", graph_median(calls), moved, flops)
