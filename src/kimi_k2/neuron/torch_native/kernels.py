"""Our NKI kernels as operations of the line's graphs, each beside a PyTorch form. The line's own check decides."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Physical cores of a logical one, as the runtime is told.
CORES = "NEURON_LOGICAL_NC_CONFIG"
MOST_TOKENS = 128


def cores() -> int:
    """1 or 2 (LNC)."""
    return int(os.environ.get(CORES, "2"))


def kernel(module: str, name: str, tensor: Tensor) -> Callable[..., Any] | None:
    """A kernel of `kimi_k2.nki.kernels` that takes and gives tensors; None where PyTorch's form is to run.

    `can_run_kernel` is false on a CPU unless NKI_SIMULATOR=1, and where the line is not installed.
    """
    try:
        hop = importlib.import_module("vllm_neuron.nki.nki_hop")
    except ImportError:
        return None
    if not hop.can_run_kernel(tensor):
        return None
    wrapped = hop.wrap_nki(getattr(importlib.import_module(f"kimi_k2.nki.kernels.{module}"), name))
    return wrapped[cores()]  # type: ignore[no-any-return]


def router(x: Tensor, weight_t: Tensor, bias: Tensor, scaling: float, norm: bool, top_k: int) -> Any:
    """`noaux_tc_router` of [T, H] by [H, E]: int64 [T, k] and float32 [T, k]; None where it does not run."""
    if len(x) > MOST_TOKENS or x.shape[1] % (128 * cores()) or top_k > 8:
        return None
    run = kernel("router", "noaux_tc_router", x)
    if run is None:
        return None
    index, weights, _ = run(x, weight_t, bias.unsqueeze(0), scaling, norm, top_k)
    return index.to(torch.long), weights


def experts(
    x: Tensor, held: Mapping[str, Tensor], shared: Mapping[str, Tensor], index: Tensor, weights: Tensor, count: int
) -> Tensor | None:
    """`selective_experts`, [T, H] to this rank's part of [T, H] with its part of the shared expert; None as above.

    Args:
        x: activations.
        held: the routed experts' tiles and scales by the names of their parameters.
        shared: the shared expert's, empty where it is elsewhere.
        index: int64 [T, 8], numbers among this rank's experts; others lie outside.
        weights: float32 [T, 8].
        count: routed experts of all ranks.
    """
    if len(x) > MOST_TOKENS or x.shape[1] % (128 * cores()) or index.shape[1] != 8:
        return None
    run = kernel("experts", "selective_experts", x)
    if run is None:
        return None
    named = {f"shared_{name}": tensor.squeeze(0) for name, tensor in tiles(shared).items()}
    out = run(x, *tiles(held).values(), index.to(torch.int32), weights, 0, count, **named)
    return out.reshape(x.shape)  # type: ignore[no-any-return]


def tiles(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names of the kernel's arguments, in its order."""
    if not held:
        return {}
    gate_up, down = held["gate_up_proj.weight"], held["down_proj.weight"]
    if "down_proj.scale" not in held:  # the shared expert of an INT4 checkpoint
        return {"gate_up_tiles": gate_up, "down_tiles": down}
    return {
        "gate_up_tiles": gate_up,
        "gate_up_scales": held["gate_up_proj.scale"],
        "down_tiles": down,
        "down_scales": held["down_proj.scale"].squeeze(1),
    }


def attention(query: Tensor, entries: Tensor, new: Tensor, lengths: Tensor, rank: int, scale: float) -> Tensor | None:
    """`mla_decode` of one token a line: sums of latents, float32 [B, heads, rank]; None as above.

    Args:
        query: [B, heads, rank + rope], absorbed and rotated.
        entries: [B, S, rank + rope], a line's pages one after another.
        new: [B, rank + rope], the token's own entry.
        lengths: int64 [B], tokens before it.
        rank: kv_lora_rank.
        scale: of the scores.
    """
    if query.shape[1] > MOST_TOKENS or entries.shape[1] % (128 * cores()) or rank % 128:
        return None
    run = kernel("mla_decode", "mla_decode", query)
    if run is None:
        return None
    parts = [rank, entries.shape[2] - rank]
    latents, keys = (part.contiguous() for part in entries.split(parts, dim=-1))
    new_latents, new_keys = (part.contiguous() for part in new.split(parts, dim=-1))
    return run(  # type: ignore[no-any-return]
        query, latents, keys, new_latents, new_keys, lengths.to(torch.int32).unsqueeze(1), scale
    )
