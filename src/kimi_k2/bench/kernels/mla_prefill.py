"""Time of MLA prefill attention at the real head sizes, beside FlashAttention 3 where vLLM is, and PyTorch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.bench.kernels.harness import Row, graph_median
from kimi_k2.kernels.attention import flash_prefill
from kimi_k2.kernels.attention.mla_prefill import LAUNCH, NOPE, RANK, ROPE, VALUE, run

SHAPES = (
    *((8, 1024, 1024), (8, 2048, 2048), (8, 4096, 4096), (8, 8192, 8192), (8, 32768, 32768), (64, 4096, 4096)),
    *((8, 1024, 16384), (8, 16384, 65536)),
)  # heads, new tokens, slots
SOFTMAX_SCALE = 192**-0.5
LAUNCHES = ((128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 64, 4, 3), (128, 32, 8, 4))


class Inputs(NamedTuple):
    """One sequence whose last tokens are new: queries as the model leaves them, keys and values in both layouts."""

    nope: Tensor
    rope: Tensor
    cache: Tensor
    kv_b: Tensor
    positions: Tensor
    expanded: Tensor

    def whole(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float]:
        """Arguments of the operation."""
        return self.nope, self.rope, self.cache, self.kv_b, self.positions, SOFTMAX_SCALE


def expand(cache: Tensor, kv_b: Tensor) -> Tensor:
    """Keys without position and values of all heads by one GEMM, [B, H, T, 256]."""
    return torch.matmul(cache[..., :RANK].unsqueeze(1), kv_b.mT)


def random_inputs(heads: int, queries: int, slots: int) -> Inputs:
    """One sequence whose last `queries` tokens are new."""
    shapes = (1, queries, heads, NOPE + ROPE), (1, slots, RANK + ROPE), (heads, NOPE + VALUE, RANK)
    q, cache, kv_b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    kv_b *= RANK**-0.5
    positions = torch.arange(slots - queries, slots, device="cuda")[None]
    nope, rope = q.split([NOPE, ROPE], dim=-1)
    return Inputs(nope, rope, cache, kv_b, positions, expand(cache, kv_b))


def call(one: Inputs, launch: tuple[int, int, int, int]) -> Tensor:
    """`mla_prefill` with a launch of its own."""
    return run(one.nope, one.rope, one.expanded, one.cache, one.positions, SOFTMAX_SCALE, launch)


def padded(nope: Tensor, rope: Tensor, expanded: Tensor, cache: Tensor) -> Tensor:
    """The same where no tokens are cached before: values padded to the keys' width, as PyTorch's operation wants."""
    keys, values = expanded.split([NOPE, VALUE], dim=-1)
    rotated = cache[:, None, :, -ROPE:].expand(-1, keys.shape[1], -1, -1)
    q = torch.cat((nope, rope), dim=-1).transpose(1, 2)
    wide = F.pad(values, (0, ROPE))
    return F.scaled_dot_product_attention(
        q, torch.cat((keys, rotated), dim=-1), wide, is_causal=True, scale=SOFTMAX_SCALE
    )


def ways(inputs: list[Inputs]) -> dict[str, list[Callable[[], object]]]:
    """FlashAttention 3 alone, with keys and values made before it, and one GEMM that makes these."""
    if flash_prefill.flash_attention() is None:
        return {}
    ready = [
        (flash_prefill.join(one.nope, one.rope), *flash_prefill.keys_and_values(one.cache, one.kv_b)) for one in inputs
    ]
    return {
        "FlashAttention 3 alone": [partial(flash_prefill.attend, *one, SOFTMAX_SCALE) for one in ready],
        "with keys and values": [partial(flash_prefill.mla_naive_attention, *one.whole()) for one in inputs],
        "one GEMM alone": [partial(expand, one.cache, one.kv_b) for one in inputs],
    }


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
        for name, way in ways(inputs).items():
            yield Row("mla_prefill", case, name, graph_median(way), moved, flops)
        if with_peers and queries == slots and queries <= 8192:
            calls = [partial(padded, one.nope, one.rope, one.expanded, one.cache) for one in inputs]
            yield Row("mla_prefill", case, "PyTorch SDPA", graph_median(calls), moved, flops)
