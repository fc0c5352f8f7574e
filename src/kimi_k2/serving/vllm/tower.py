"""Images and video chunks that ranks share out (`--mm-encoder-tp-mode data`), by vLLM's own tower of K2.5.

vLLM's function for this, also in 0.32, counts a chunk's rows frame by frame, but this tower has taken the mean of the
frames by then: what lies behind a chunk on its rank came out as other items' rows.
"""

from __future__ import annotations

import importlib
import math
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from kimi_k2.serving.vllm import adapter
from kimi_k2.serving.vllm.adapter import (
    get_load_balance_assignment,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)

SHARES_OUT = "run_dp_sharded_mrope_vision_model"


def shared_out(
    vision_model: Any, pixel_values: Tensor, grid_thw_list: list[list[int]], **_: object
) -> tuple[Tensor, ...]:
    """Rows of each item, [height * width / merged, merged, hidden], on every rank.

    Args:
        vision_model: vLLM's tower, whole on each rank.
        pixel_values: patches of all items, one behind the other.
        grid_thw_list: frames, height and width of each in patches.
    """
    merged, hidden = math.prod(vision_model.merge_kernel_size), vision_model.config.hidden_size
    patches = [math.prod(grid) for grid in grid_thw_list]
    rows = [height * width // merged for _, height, width in grid_thw_list]
    order, counts, _ = get_load_balance_assignment(patches, get_tensor_model_parallel_world_size())
    shares = [order[begin:end] for begin, end in pairwise(accumulate(counts, initial=0))]
    most = max(sum(rows[item] for item in share) for share in shares)
    own_rows = pixel_values.new_zeros(most, merged, hidden, dtype=next(vision_model.parameters()).dtype)
    if own := shares[get_tensor_model_parallel_rank()]:
        by_item = pixel_values.split(patches)
        grids = torch.tensor([grid_thw_list[item] for item in own])
        embeddings = torch.cat(list(vision_model(torch.cat([by_item[item] for item in own]), grids)))
        own_rows[: len(embeddings)] = embeddings
    of_ranks = tensor_model_parallel_all_gather(own_rows, dim=0).split(most)
    items: dict[int, Tensor] = {}
    for share, rank_rows in zip(shares, of_ranks, strict=True):
        sizes = [rows[item] for item in share]
        items |= zip(share, rank_rows.split([*sizes, most - sum(sizes)]), strict=False)
    return tuple(items[item] for item in range(len(rows)))


def share_out() -> None:
    """Have vLLM's K2.5 do so."""
    with adapter.unless_changed("images that ranks share out are as vLLM has them"):
        tower = importlib.import_module(adapter.NAMES[SHARES_OUT].modules[0])
        if not hasattr(tower, SHARES_OUT):
            raise ImportError(SHARES_OUT)
        setattr(tower, SHARES_OUT, shared_out)
