"""Where vLLM's block tables on a GPU store tokens of caches that are spread over ranks; those on a CPU refuse to say.

For `worker_extension_cls`: the import in each worker lets its own model runner have such caches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.block_table import BlockTable


class SpreadSlots:
    """Adds nothing to the worker."""


def compute_slot_mapping(self: Any, num_reqs: int, query_start_loc: Tensor, positions: Tensor) -> None:
    """See `vllm.v1.worker.block_table`: interleaved runs of tokens within as many pages' slots as there are ranks."""
    ranks, run, page = self.dcp_world_size, self.cp_kv_cache_interleave_size, self.block_size
    counts = query_start_loc[: num_reqs + 1].diff()
    request = torch.arange(num_reqs).repeat_interleave(counts)
    at = positions[: len(request)]
    pages = self.block_table.gpu[request, at // (page * ranks)].long()
    within = at % (page * ranks)
    slots = pages * page + within // (ranks * run) * run + within % run
    self.slot_mapping.gpu.fill_(-1)
    self.slot_mapping.gpu[: len(at)] = torch.where(within // run % ranks == self.dcp_rank, slots, -1)


BlockTable.compute_slot_mapping = compute_slot_mapping
