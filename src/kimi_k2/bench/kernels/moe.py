"""Time of the FP8 expert operation: median of CUDA-graph replays over routings that do not fit the L2 together."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import partial

import torch
from torch import Tensor

from kimi_k2.bench.kernels.harness import Row, graph_median
from kimi_k2.kernels.experts import fp8_decode as moe_decode
from kimi_k2.kernels.experts.fp8 import moe_fp8
from kimi_k2.kernels.experts.tuning import ExpertChoice

# name -> (experts, intermediate, top_k): a rank's slice, under EP with the pairs of T tokens that arrive.
SHAPES = {"TP8": (384, 256, 8), "EP8": (48, 2048, 1), "TP4": (384, 512, 8), "EP4": (96, 2048, 2)}
HIDDEN = 7168
# Tokens -> microseconds to reach, if any.
TARGETS: dict[str, dict[int, int | None]] = {
    "TP8": {1: 17, 8: 75, 64: 350, 512: 500, 4096: 950},
    "EP8": {1: 16, 8: 82, 64: 345, 512: 500, 4096: 800},
    "TP4": {64: None, 512: None},
    "EP4": {64: None, 512: None},
}
MANY = (8192, 16384, 32768)
SKEWED = (16, 64)


@dataclass(frozen=True)
class Timing:
    """Median microseconds of one call, and the bytes of the distinct experts' weights that it reads."""

    microseconds: float
    weight_bytes: float

    @property
    def gigabytes_per_second(self) -> float:
        """Rate at which the weights are read, in GB/s (10^9 bytes)."""
        return self.weight_bytes / self.microseconds / 1e3


def random_experts(
    experts: int, inter: int, hidden: int, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Random gate_up_proj, its scales, down_proj, its scales, in the shapes that `moe_fp8` takes."""

    def weight(rows: int, columns: int) -> Tensor:
        made = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=device)
        for expert in made:
            expert.copy_((torch.randn(rows, columns, device=device) * 60).clamp(-448, 448))
        return made

    def scale(rows: int, columns: int) -> Tensor:
        return (torch.rand(experts, rows // 128, columns // 128, device=device) + 0.5) * (0.02 / 60)

    return weight(2 * inter, hidden), scale(2 * inter, hidden), weight(hidden, inter), scale(hidden, inter)


def random_routing(
    tokens: int, top_k: int, experts: int, device: str = "cuda", *, same: bool = False
) -> tuple[Tensor, Tensor]:
    """Uniform distinct experts a token, or the same for all tokens, and positive weights that sum to 2.827."""
    indices = torch.rand(1 if same else tokens, experts, device=device).topk(top_k, dim=-1).indices
    indices = indices.expand(tokens, -1).contiguous()
    weights = torch.rand(tokens, top_k, device=device)
    return indices, (weights / weights.sum(-1, keepdim=True) * 2.827).contiguous()


def time_experts(
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    tokens: int,
    top_k: int,
    choice: ExpertChoice | None = None,
    *,
    same: bool = False,
    replays: int = 25,
) -> Timing:
    """Median of the replays of a graph of calls, each with its own tokens and routing.

    Without `choice` the operation is the one that the model would take. `same`: all tokens' experts are the same.
    """
    experts, hidden, inter = weights[2].shape
    calls = 24 if tokens <= 8 else 6 if tokens <= 512 else 2
    pinned = None if choice is None else [int(v) for v in astuple(choice)]
    sets = []
    for _ in range(calls):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        sets.append((x, *random_routing(tokens, top_k, experts, same=same)))
    operation: Callable[..., Tensor] = partial(moe_fp8, choice=pinned)
    if choice is None and moe_decode.supports(tokens, top_k, hidden, inter, weights[0].device):
        operation = moe_decode.moe_decode
    timed = [partial(operation, x, *weights, *routing) for x, *routing in sets]
    microseconds = graph_median(timed, replays, warm_up=min(3, replays))
    distinct = statistics.mean(indices.unique().numel() for _, indices, _ in sets)
    return Timing(microseconds, distinct * 3 * inter * hidden)


def rows(with_peers: bool = True) -> Iterator[Row]:
    """Each shape with the tuned launches, and with all tokens sent to the same experts."""
    for name, (experts, inter, top_k) in SHAPES.items():
        weights = random_experts(experts, inter, HIDDEN)
        uniform = [(tokens, target, False) for tokens, target in {**TARGETS[name], **dict.fromkeys(MANY)}.items()]
        for tokens, target, same in [*uniform, *((tokens, None, True) for tokens in SKEWED)]:
            timing = time_experts(weights, tokens, top_k, same=same)
            moved = timing.weight_bytes + 2 * tokens * HIDDEN * 2
            flops = 2 * tokens * top_k * 3 * HIDDEN * inter
            case = f"{name}: {experts} x {inter}, T={tokens}{', all to the same' * same}"
            yield Row("FP8 experts", case, "ours", timing.microseconds, moved, flops, target)
        del weights


def candidates(tokens: int, top_k: int, inter: int) -> list[ExpertChoice]:
    """The choices worth timing for a token count."""
    found = []
    if tokens * top_k <= 512:
        splits1 = (8, 4) if tokens * top_k <= 8 else (4, 2, 1) if tokens * top_k <= 64 else (2, 1)
        splits2 = [s for s in (1, 2, 4) if s <= inter // 128 and (s == 1 or inter > 512)]
        slabs = (1, 2) if inter > 512 else (1, 2, 4)
        found += [ExpertChoice(True, 16, a, b, c) for a in splits1 for b in splits2 for c in slabs]
    if tokens >= 8:
        rows = (32,) if tokens < 128 else (32, 64) if tokens <= 1024 else (64, 128, 256)
        each = (1, 2, 7) if tokens > 1024 else (1, 2) if inter > 512 else (1, 2, 4, 7)
        found += [ExpertChoice(False, r, 1, 1, c) for r in rows for c in each]
    return found
