"""What the expert kernels' Python sides have in common: checks of the routing, parts of long inputs, arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.structure import Structure
from kimi_k2.kernels.common.workspace import MAX_BYTES, Layout, scratch
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


def queues(
    kind: type[Structure],
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor | None],
    shape: Shape,
    choice_for: Callable[[int], ExpertChoice],
    lay_out: Callable[..., Layout],
) -> Iterator[tuple[Structure, ExpertChoice]]:
    """The launches of a call, each with its share of the tokens and its scratch memory, which is held to the next one.

    Args:
        kind: `Fp8Args`, or what is derived from it, of which the fields are left out that only one of the kernels has.
        tensors: by field name x and out [T, H], indices and weights [T, k].
        weights: of the experts, and `expert_map`; None stays null.
        shape: of the whole call.
        choice_for: the choice for so many tokens.
        lay_out: the scratch memory of a shape and choice, `lay_out(*shape, choice)`.

    Raises:
        KernelError: the shape does not allow the choice.
    """
    (tokens, *sizes), device = shape, tensors["x"].device
    top_k, _, hidden, inter = sizes
    choice_for(tokens).check(tokens, top_k, hidden, inter)
    for begin, end in token_ranges(tokens, lambda count: lay_out(count, *sizes, choice_for(count)).bytes):
        count, choice = end - begin, choice_for(end - begin)
        memory = scratch(lay_out(count, *sizes, choice), device)
        own = {name: tensor[begin:end] for name, tensor in tensors.items()}
        part = count, *shape[1:]
        queue = fill(kind, part, own["topk_ids"], weights["expert_map"], **memory.addresses, **own, **weights)
        queue.fused, queue.nmax, queue.splits1, queue.splits2, queue.item_slabs = astuple(choice)
        queue.grid, queue.pdl = hopper(device.index, "routed experts")[1], 1
        yield queue, choice


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
