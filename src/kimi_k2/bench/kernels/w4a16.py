"""Time of the four-bit expert operation: median of CUDA-graph replays over routings that do not fit the L2 together."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_k2.bench.kernels.harness import Row, graph_median
from kimi_k2.bench.kernels.moe import HIDDEN, random_routing
from kimi_k2.kernels.experts.tuning import ExpertChoice
from kimi_k2.kernels.experts.w4a16 import moe_w4a16
from kimi_k2.kernels.experts.w4a16_layout import FORMATS, INT4, FourBits, PreparedW4A16

EXPERTS, INTER, TOP_K = 384, 512, 8
TARGETS = {1: 18.0, 8: 95.0, 64: 400.0, 512: 560.0, 16384: 6500.0}
# The formats beside each other: tokens, and the intermediate size of a rank of eight.
TOKENS, NARROW = (1, 4, 16, 64, 128, 256, 1024, 4096), 256


def random_packed(
    experts: int, rows: int, columns: int, device: str = "cuda", kind: FourBits = INT4
) -> tuple[Tensor, Tensor]:
    """Random words, every stored nibble in 1..15, and scales that make weights of deviation about 0.02.

    NVFP4's are those times 2^16, for which its scale of all makes up (`scales_of_all`).
    """
    nibbles = torch.randint(1, 16, (experts, rows, columns // 2, 2), dtype=torch.uint8, device=device)
    packed = (nibbles[..., 0] | (nibbles[..., 1] << 4)).view(torch.int32)
    scale = torch.rand(experts, rows, columns // kind.group, device=device) + 0.5
    if kind.scale == torch.uint8:
        return packed, (scale.log2().round() + 127 - 7).to(torch.uint8)
    if kind.scale == torch.float8_e4m3fn:
        return packed, (scale * 448 / 1.5).to(kind.scale)
    return packed, (scale * (0.02 / 4.3)).bfloat16()


def scales_of_all(experts: int, inter: int, hidden: int, kind: FourBits, device: str = "cuda") -> dict[str, Any]:
    """The operation's arguments of NVFP4; of others none."""
    if kind.scale != torch.float8_e4m3fn:
        return {}
    return {
        name: torch.full((experts, rows, 1), 2.0**-16, device=device)
        for name, rows in (("gate_up_proj_all", 2 * inter), ("down_proj_all", hidden))
    }


def random_experts(
    experts: int = EXPERTS,
    inter: int = INTER,
    hidden: int = HIDDEN,
    w2_bf16: bool = False,
    device: str = "cuda",
    kind: FourBits = INT4,
) -> PreparedW4A16:
    """Random weights taken as already prepared: any words are."""
    first = random_packed(experts, 2 * inter, hidden, device, kind)
    if not w2_bf16:
        return PreparedW4A16(*first, *random_packed(experts, hidden, inter, device, kind))
    dense = torch.empty(experts, hidden, inter, dtype=torch.bfloat16, device=device).normal_(std=0.02)
    return PreparedW4A16(*first, dense, None)


def time_experts(
    weights: PreparedW4A16,
    tokens: int,
    top_k: int = TOP_K,
    choice: ExpertChoice | None = None,
    *,
    same: bool = False,
    replays: int = 25,
    **more: Any,
) -> tuple[float, float]:
    """(median microseconds of a call, bytes of the distinct experts' weights); each call has its own routing.

    `same`: all tokens' experts are the same. `more`: as `scales_of_all` makes it.
    """
    experts = weights.gate_up_proj_packed.shape[0]
    calls = 24 if tokens <= 8 else 6 if tokens <= 512 else 2
    pinned = None if choice is None else [int(v) for v in astuple(choice)]
    sets = []
    for _ in range(calls):
        x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        sets.append((x, *random_routing(tokens, top_k, experts, same=same)))
    timed = [partial(moe_w4a16, x, *weights, *routing, choice=pinned, **more) for x, *routing in sets]
    microseconds = graph_median(timed, min(replays, 15) if tokens > 512 else replays, warm_up=min(3, replays))
    distinct = statistics.mean(indices.unique().numel() for _, indices, _ in sets)
    each = sum(part[0].numel() * part.element_size() for part in weights if part is not None)
    return microseconds, distinct * each


def candidates(tokens: int, top_k: int = TOP_K, inter: int = INTER) -> list[ExpertChoice]:
    """The choices worth timing for a token count."""
    found = []
    if tokens * top_k <= 512:
        splits1 = (8, 4) if tokens * top_k <= 8 else (4, 2, 1) if tokens * top_k <= 64 else (2, 1)
        splits2 = [s for s in (1, 2, 4) if s <= inter // 128] if tokens * top_k <= 64 else [1]
        found += [ExpertChoice(True, 16, a, b, c) for a in splits1 for b in splits2 for c in (1, 2, 4)]
    if tokens >= 8:
        rows = (32,) if tokens <= 512 else (64, 128)
        found += [ExpertChoice(False, r, 1, 1, c) for r in rows for c in (1, 2, 4, 7)]
    return found


def rows(with_peers: bool = True) -> Iterator[Row]:
    """Every token count with a target, then each format with INT4's tuned choices; no peer is known here."""
    weights = random_experts()
    for tokens, target in TARGETS.items():
        microseconds, weight_bytes = time_experts(weights, tokens)
        moved = weight_bytes + 4 * tokens * HIDDEN
        flops = 6.0 * tokens * TOP_K * INTER * HIDDEN
        case = f"{EXPERTS} experts, N={INTER}, T={tokens}"
        yield Row("moe_w4a16", case, "ours", microseconds, moved, flops, target)
    del weights
    for kind in FORMATS:
        weights = random_experts(inter=NARROW, kind=kind)
        more = scales_of_all(EXPERTS, NARROW, HIDDEN, kind)
        name = kind.library.rpartition("/")[2].removeprefix("w4a16").strip("_") or "int4"
        for tokens in TOKENS:
            microseconds, weight_bytes = time_experts(weights, tokens, **more)
            moved, flops = weight_bytes + 4 * tokens * HIDDEN, 6.0 * tokens * TOP_K * NARROW * HIDDEN
            yield Row("moe_w4a16", f"{name}, N={NARROW}, T={tokens}", "ours", microseconds, moved, flops)
        del weights, more
