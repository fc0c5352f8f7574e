"""Our NKI kernels as operations of the line's graphs, each beside a PyTorch form. The line's own check decides."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_k2.nki.kernels import MODULES

# Physical cores of a logical one, as the runtime is told.
CORES = "NEURON_LOGICAL_NC_CONFIG"
NOWHERE = 2**31 - 1  # of `cache_write`, which imports `nki`
TILE, RUN = 128, 8  # slots of a tile of the cache, and after each other at most as a partition loads them
# Where the line has its check and its wrapper: of 0.24 and later, and of 0.21.
_PLACES = (
    ("vllm_neuron.utils.neuron_utils", "libtorch_neuronx_lite.nki.nki_hop"),
    ("vllm_neuron.nki.nki_hop", "vllm_neuron.nki.nki_hop"),
)


@dataclass(frozen=True)
class Kernels:
    """Those of `kimi_k2.nki.kernels` that take and give tensors.

    Attributes:
        can_run: the line's check of a tensor: false on a CPU unless NKI_SIMULATOR=1.
        wrap: the line's wrapper; it is called inside the graph, as the line's own operations do. It takes tensors as
            arguments of their own, so a call is of one layer.
        cores: 1 or 2 (LNC).
        made: kernels by name.
    """

    can_run: Callable[[Tensor], bool]
    wrap: Callable[[Any], Any]
    cores: int
    made: Mapping[str, Any]

    @classmethod
    def find(cls) -> Kernels:
        """The line's, looked up once: a graph cannot import. Without the line there are none to run."""
        cores = int(os.environ.get(CORES, "2"))
        for check, wrapper in _PLACES:
            try:
                can_run = importlib.import_module(check).can_run_kernel
                wrap = importlib.import_module(wrapper).wrap_nki
            except (ImportError, AttributeError):
                continue
            made = {
                name: getattr(importlib.import_module(f"kimi_k2.nki.kernels.{MODULES[name]}"), name)
                for name in ("decode_layer", "write_pages")
            }
            return cls(can_run, wrap, cores, made)
        return cls(lambda tensor: False, lambda kernel: kernel, cores, {})

    def layer(self, **arguments: Any) -> list[Tensor]:
        """`decode_layer`: residual, new latents and keys, and the next layer's down projections where it has one."""
        return list(self.wrap(self.made["decode_layer"])[self.cores](**arguments))

    def runs(self, table: Tensor, block: int) -> dict[str, Any] | None:
        """Where the slots of pages int32 [B, M] lie, as `decode_layer` takes it; None where it does not.

        Negative pages, which are none, are the null block.
        """
        slots = table.shape[1] * block
        if slots % (TILE * self.cores):
            return None
        each = math.gcd(RUN, block, slots // TILE // self.cores)
        inside = torch.arange(block // each, dtype=torch.int32, device=table.device)
        return {"each": each, "runs": (table.clamp(min=0).unsqueeze(-1) * (block // each) + inside).flatten(1)}

    def write(self, halves: tuple[Tensor, Tensor], entries: Tensor, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """`write_pages`: the pages with [T, 2 D] entries at int64 [T] slots, 0 and below dropped; None as above.

        In PyTorch this is a scatter, which the line's XLA route makes of the whole pool; the kernel moves the rows.
        """
        if not self.can_run(entries):
            return None
        rows = torch.where(slots > 0, slots, torch.full_like(slots, NOWHERE)).to(torch.int32)
        former, latter = self.wrap(self.made["write_pages"])[self.cores](*halves, entries, rows.unsqueeze(1))
        return former, latter
