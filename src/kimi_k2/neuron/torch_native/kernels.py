"""Our NKI kernels as operations of the line's graphs, each beside a PyTorch form. The line's own check decides."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kimi_k2.nki.kernels import MODULES

# Physical cores of a logical one, as the runtime is told.
CORES = "NEURON_LOGICAL_NC_CONFIG"
MOST_TOKENS = 128
NOWHERE = 2**31 - 1  # of `cache_write`, which imports `nki`
# Where the line has its check and its wrapper: of 0.24 and later, and of 0.21.
_PLACES = (
    ("vllm_neuron.utils.neuron_utils", "libtorch_neuronx_lite.nki.nki_hop"),
    ("vllm_neuron.nki.nki_hop", "vllm_neuron.nki.nki_hop"),
)


@dataclass(frozen=True)
class Kernels:
    """Those of `kimi_k2.nki.kernels` that take and give tensors. Each gives None where PyTorch's form is to run.

    Attributes:
        can_run: the line's check of a tensor: false on a CPU unless NKI_SIMULATOR=1.
        wrap: the line's wrapper; it is called inside the graph, as the line's own operations do.
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
            names = ("noaux_tc_router", "selective_experts", "mla_decode_pages", "write_pages")
            made = {
                name: getattr(importlib.import_module(f"kimi_k2.nki.kernels.{MODULES[name]}"), name) for name in names
            }
            return cls(can_run, wrap, cores, made)
        return cls(lambda tensor: False, lambda kernel: kernel, cores, {})

    def router(self, x: Tensor, weight_t: Tensor, bias: Tensor, scaling: float, norm: bool, top_k: int) -> Any:
        """`noaux_tc_router` of [T, H] by [H, E]: int64 [T, k] and float32 [T, k]; None where it does not run."""
        if len(x) > MOST_TOKENS or x.shape[1] % (128 * self.cores) or top_k > 8 or not self.can_run(x):
            return None
        run = self.wrap(self.made["noaux_tc_router"])[self.cores]
        index, weights = run(x, weight_t, bias.unsqueeze(0), scaling, norm, top_k)
        return index.to(torch.long), weights

    def experts(
        self,
        x: Tensor,
        routed: Mapping[str, Tensor],
        shared: Mapping[str, Tensor],
        index: Tensor,
        weights: Tensor,
        count: int,
    ) -> Tensor | None:
        """`selective_experts`, [T, H] to this rank's part of [T, H] with its part of the shared expert; None as above.

        Args:
            x: activations.
            routed: the routed experts' tiles and scales by the names of their parameters.
            shared: the shared expert's, empty where it is elsewhere.
            index: int64 [T, 8], numbers among this rank's experts; others lie outside.
            weights: float32 [T, 8].
            count: routed experts of all ranks.
        """
        if len(x) > MOST_TOKENS or x.shape[1] % (128 * self.cores) or index.shape[1] != 8 or not self.can_run(x):
            return None
        run = self.wrap(self.made["selective_experts"])[self.cores]
        named = {f"shared_{name}": tensor.squeeze(0) for name, tensor in tiles(shared).items()}
        out = run(x, *tiles(routed).values(), index.to(torch.int32), weights, 0, count, **named)
        return out.reshape(x.shape)  # type: ignore[no-any-return]

    def attention(
        self,
        query: Tensor,
        halves: tuple[Tensor, Tensor],
        table: Tensor,
        new: Tensor,
        lengths: Tensor,
        rank: int,
        scale: float,
    ) -> Tensor | None:
        """`mla_decode_pages` of one token a line: sums of latents, float32 [B, heads, rank]; None as above.

        Args:
            query: [B, heads, rank + rope], absorbed and rotated.
            halves: K's and V's pages, [blocks, 1, block, (rank + rope) / 2] each.
            table: int32 [B, M], pages of each line; negative or 0: none.
            new: [B, rank + rope], the token's own entry.
            lengths: int64 [B], tokens before it.
            rank: kv_lora_rank.
            scale: of the scores.
        """
        half = halves[0].shape[-1]
        former, latter = (pages.view(-1, half) for pages in halves)
        block = len(former) // len(halves[0])
        slots = table.shape[1] * block
        unfit = query.shape[1] > MOST_TOKENS or slots % (128 * self.cores) or rank % 128 or half > rank
        if unfit or former.dtype != query.dtype or not self.can_run(query):
            return None
        run = self.wrap(self.made["mla_decode_pages"])[self.cores]
        inside = torch.arange(block, dtype=torch.int32, device=table.device)
        rows = (table.clamp(min=0).unsqueeze(-1) * block + inside).flatten(1)
        parts = [rank, new.shape[1] - rank]
        new_latents, new_keys = (part.contiguous() for part in new.split(parts, dim=-1))
        return run(  # type: ignore[no-any-return]
            query, former, latter, rows, new_latents, new_keys, lengths.to(torch.int32).unsqueeze(1), scale
        )

    def write(self, halves: tuple[Tensor, Tensor], entries: Tensor, slots: Tensor) -> tuple[Tensor, Tensor] | None:
        """`write_pages`: the pages with [T, 2 D] entries at int64 [T] slots, 0 and below dropped; None as above.

        In PyTorch this is a scatter, which the line's XLA route makes of the whole pool; the kernel moves the rows.
        """
        if not self.can_run(entries):
            return None
        rows = torch.where(slots > 0, slots, torch.full_like(slots, NOWHERE)).to(torch.int32)
        former, latter = self.wrap(self.made["write_pages"])[self.cores](*halves, entries, rows.unsqueeze(1))
        return former, latter


def tiles(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters under the names of the kernel's arguments, in its order."""
    if not parameters:
        return {}
    gate_up, down = parameters["gate_up_proj.weight"], parameters["down_proj.weight"]
    if "down_proj.scale" not in parameters:  # the shared expert of an INT4 checkpoint
        return {"gate_up_tiles": gate_up, "down_tiles": down}
    return {
        "gate_up_tiles": gate_up,
        "gate_up_scales": parameters["gate_up_proj.scale"],
        "down_tiles": down,
        "down_scales": parameters["down_proj.scale"].squeeze(1),
    }
