"""The tower on several ranks: whole packs of images are dealt out by their cost, and every rank gets all embeddings.

All ranks know all images, so each knows who runs what and the size of every result: there is nothing to agree on, and
a rank without a pack takes part in the exchange like the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_k2.engine.vision import CACHE_BYTES, PACK_PATCHES, VisionEncoder, run_pack
from kimi_k2.media.patches import Media
from kimi_k2.model.vision.model import VisionModel


def dealt(costs: Sequence[int], ranks: int) -> list[int]:
    """The rank of each pack: the dearest first, each to the rank that has least so far."""
    load, owner = [0] * ranks, [0] * len(costs)
    for pack in sorted(range(len(costs)), key=lambda pack: (-costs[pack], pack)):
        owner[pack] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owner[pack]] += costs[pack]
    return owner


def cost(model: VisionModel, pack: Sequence[Media]) -> int:
    """Multiply-adds of a pack's encoder: linears by patches, attention by the square of each image's."""
    config = model.config
    weights = 4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    patches = [media.grid.patches for media in pack]
    a_layer = sum(count * weights + 2 * count**2 * config.hidden_size for count in patches)
    return config.num_hidden_layers * a_layer


def data_parallel(
    model: VisionModel, *, pack_patches: int = PACK_PATCHES, cache_bytes: int = CACHE_BYTES
) -> VisionEncoder:
    """An encoder whose `encode` all ranks must call with the same media, in the same order.

    Args:
        model: whole on every rank.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()

    def run(packs: Sequence[Sequence[Media]]) -> list[Tensor]:
        owner = dealt([cost(model, pack) for pack in packs], ranks)
        width, merge = model.text_hidden_size, model.config.merge_kernel_size
        results = []
        for pack, holder in zip(packs, owner, strict=True):  # own packs first, so that ranks work at once
            tokens = sum(media.grid.tokens(merge) for media in pack)
            empty = torch.empty(tokens, width, dtype=model.dtype, device=model.device)
            results.append(run_pack(model, pack) if holder == rank else empty)
        for rows, holder in zip(results, owner, strict=True):
            dist.broadcast(rows, src=holder)
        return results

    return VisionEncoder(model, pack_patches=pack_patches, cache_bytes=cache_bytes, run=run)
