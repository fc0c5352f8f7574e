"""What the expert kernels' Python sides have in common: checks of the routing, parts of long inputs, arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kimi_k2.kernels.common.structure import Structure
from kimi_k2.kernels.common.workspace import MAX_BYTES, Layout, Scratch, scratch
from kimi_k2.kernels.experts.tuning import ExpertChoice

Shape = tuple[int, int, int, int, int]  # tokens, top_k, experts, hidden, intermediate


# Of T tokens to k experts, `expert_map` from the model's to local ones.
ROUTING = "topk_indices i64|i32[T,k], topk_weights f32[T,k], expert_map i32[M]?"
MAPPED = "expert_map is None or M"


def token_ranges(tokens: int, needs: Callable[[int], int]) -> list[tuple[int, int]]:
    """The tokens in as few parts, of about the same size, as keep each one's scratch memory within its bound.

    Args:
        needs: bytes of scratch memory for so many tokens.
    """
    parts = 1
    while needs(-(-tokens // parts)) > MAX_BYTES and parts < tokens:
        parts += 1
    size = -(-tokens // parts)
    return [(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]


class Routing(NamedTuple):
    """Of some tokens: indices and weights [T, k], and the map to local experts, None for all of them."""

    topk_indices: Tensor
    topk_weights: Tensor
    expert_map: Tensor | None


class Part(NamedTuple):
    """One launch over some of a call's tokens.

    Attributes:
        shape, choice, routing: of these tokens.
        memory: scratch memory, to be held until the launch is in its stream.
        tensors: x, out and the scratch memory, by the argument structure's fields.
    """

    shape: Shape
    choice: ExpertChoice
    routing: Routing
    memory: Scratch
    tensors: dict[str, Tensor | int]


def parts(
    x: Tensor,
    out: Tensor,
    routing: Routing,
    shape: Shape,
    pinned: list[int] | None,
    choose: Callable[[int], ExpertChoice],
    lay_out: Callable[..., Layout],
) -> Iterator[Part]:
    """The launches of a call, each with its share of the tokens and its scratch memory.

    Args:
        x, out: [T, H].
        shape: of the whole call.
        pinned: the fields of the choice for every launch; None asks `choose`.
        choose: the choice for so many tokens.
        lay_out: the scratch memory of a shape and choice, `lay_out(*shape, choice)`.

    Raises:
        KernelError: the shape does not allow the choice.
    """
    tokens, *sizes = shape
    top_k, _, hidden, inter = sizes

    def choice_for(count: int) -> ExpertChoice:
        return choose(count) if pinned is None else ExpertChoice(bool(pinned[0]), *pinned[1:])

    choice_for(tokens).check(tokens, top_k, hidden, inter)
    for begin, end in token_ranges(tokens, lambda count: lay_out(count, *sizes, choice_for(count)).bytes):
        choice, part = choice_for(end - begin), (end - begin, *shape[1:])
        memory = scratch(lay_out(*part, choice), x.device)
        mine = Routing(routing.topk_indices[begin:end], routing.topk_weights[begin:end], routing.expert_map)
        yield Part(part, choice, mine, memory, {**memory.addresses, "x": x[begin:end], "out": out[begin:end]})


def fill(
    kind: type[Structure], shape: Shape, topk_indices: Tensor, expert_map: Tensor | None, /, *first: Any, **others: Any
) -> Structure:
    """The structure with these fields and those that every expert kernel has."""
    tokens, top_k, experts, hidden, inter = shape
    return kind(
        *first,
        **others,
        tokens=tokens,
        top_k=top_k,
        experts=experts,
        hidden=hidden,
        inter=inter,
        num_global=experts if expert_map is None else expert_map.shape[0],
        ids64=topk_indices.dtype == torch.int64,
    )
