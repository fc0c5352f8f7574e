"""Adapters (LoRA): vLLM reads them, keeps them and says which token has which; what they add is computed by ours.

vLLM's manager looks for linears in a model's tree of modules. Ours is a tree of stand-ins, by the names that adapters
of the published checkpoints have, each of which holds one linear's matrices. An adapter that touches anything else
(kv_b_proj, the router, embeddings) is refused by vLLM, which names the module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kimi_k2.checkpoint.names import modules
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import TensorShapeError
from kimi_k2.model.decoder import DecoderLayer
from kimi_k2.serving.paged.adapted import EXPERTS, PROJECTIONS, AdaptedStep, Adapters, LowRank
from kimi_k2.serving.paged.model import PagedModel
from kimi_k2.serving.vllm.adapter import BaseLayerWithLoRA, Deployment, LinearBase
from kimi_k2.serving.vllm.step import adapters_of_tokens
from kimi_k2.sharding.layout import PlannedTensor

# By vLLM's names of joined linears, for `--lora-target-modules`.
PACKED = {"gate_up_proj": ["gate_proj", "up_proj"], "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"]}


class _Site(LinearBase, BaseLayerWithLoRA):  # type: ignore[misc]  # vLLM has no types for mypy here
    """Stands for one linear, or for the routed experts of a layer.

    Args:
        name: in the checkpoint.
        loras: what all sites share.
        sizes: rows and columns of each projection, whole.
    """

    def __init__(self, name: str, loras: Loras, sizes: list[tuple[int, ...]]) -> None:
        nn.Module.__init__(self)
        self.name, self.loras, self.sizes, self.n_slices = name, loras, sizes, len(sizes)
        self.made: list[LowRank] = []
        self.touched: set[int] = set()  # slots whose adapters have matrices here

    def set_mapping(self, punica_wrapper: Any) -> None:
        """Called of every site that adapters may touch, before the first."""
        super().set_mapping(punica_wrapper)
        self.made = [self.loras.empty(self.planned(number), *size) for number, size in enumerate(self.sizes)]
        # What vLLM makes its empty adapters by: whole sizes, without memory.
        shapes = [(self.loras.slots, self.loras.rank, columns) for _, columns in self.sizes]
        self.lora_a_stacked = tuple(torch.empty(shape, dtype=self.loras.dtype, device="meta") for shape in shapes)
        shapes = [(self.loras.slots, rows, self.loras.rank) for rows, _ in self.sizes]
        self.lora_b_stacked = tuple(torch.empty(shape, dtype=self.loras.dtype, device="meta") for shape in shapes)
        self.loras.wrapper = punica_wrapper

    def planned(self, number: int) -> PlannedTensor:
        """How ranks share a projection."""
        names = self.loras.paged.loader.planned
        projection = "down_proj" if PROJECTIONS[number] == "down_proj" else "gate_up_proj"
        target = f"{self.name}.{projection if self.name.endswith(EXPERTS) else 'weight'}"
        return next(tensor for name, tensor in names.items() if name.startswith(target))

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Take an adapter's matrices: of routed experts three of all experts, else one pair.

        Raises:
            TensorShapeError: they are not of the linear's sizes.
        """
        several = isinstance(lora_a, list)
        pairs = zip(lora_a, lora_b, strict=True) if several else [(lora_a, lora_b)]
        for number, (a, b) in enumerate(pairs):
            if a is None or b is None:
                self.made[number].put(index, None, None)
                continue
            rows, columns = self.sizes[number]
            if a.shape[-1] != columns or b.shape[-2] != rows:
                raise TensorShapeError(
                    f"lora_A and lora_B are {list(a.shape)} and {list(b.shape)}, of a linear [{rows}, {columns}]",
                    tensor=self.name,
                )
            self.made[number].put(index, *self.loras.local(self.planned(number), a, b))
        self.touched.add(index)
        if several and any(
            a is not None and a.dim() == 2 for a in lora_a
        ):  # what vLLM warms up with, of no expert: zeros
            self.touched.discard(index)

    def reset_lora(self, index: int) -> None:
        """An adapter that does not touch this."""
        self.touched.discard(index)
        for matrices in self.made:
            matrices.put(index, None, None)


class Loras:
    """All sites of a model, as its submodules `model.layers.N...`.

    Args:
        paged: the model, whose layers are then made by `step`.
        model: vLLM's, which takes the sites.
        it: what is deployed.
    """

    def __init__(self, paged: PagedModel, model: Any, it: Deployment) -> None:
        self.paged, self.slots, self.rank, self.dtype = paged, it.lora_slots, it.lora_rank, it.lora_dtype
        self.wrapper: Any = None
        self.adapters = Adapters(self.slots, torch.empty(0))
        self.sites: dict[str, _Site] = {}
        experts = paged.plain.config.n_routed_experts
        expert_names = [f"experts.{number}.{name}" for number in range(experts) for name in PROJECTIONS]
        model.packed_modules_mapping = {**PACKED, "experts": expert_names}
        for number in paged.layers:
            for name, sizes in _linears(paged.plain.config, number):
                whole = f"model.layers.{number}.{name}"
                self.sites[whole] = _Site(whole, self, sizes)
                _put(model, whole, self.sites[whole])
        paged.make_step = self.step

    def step(self, layer: DecoderLayer, number: int) -> AdaptedStep:
        """The layer with what its sites hold."""
        prefix = f"model.layers.{number}."
        sites = {name.removeprefix(prefix): site for name, site in self.sites.items() if name.startswith(prefix)}
        routed = sites.pop(EXPERTS, None)
        experts = {} if routed is None else dict(zip(PROJECTIONS, routed.made, strict=False))
        touched = set() if routed is None else routed.touched
        added = {name: site.made[0] for name, site in sites.items() if site.made}
        return AdaptedStep(layer, self.paged.reduce, self.paged.exchange, self.adapters, added, experts, touched)

    def empty(self, planned: PlannedTensor, rows: int, columns: int) -> LowRank:
        """Zeros for this rank's part of a linear."""
        device = self.paged.plain.lm_head.weight.device
        a, b = torch.empty(self.rank, columns, device="meta"), torch.empty(rows, self.rank, device="meta")
        a, b = self.local(planned, a, b)
        experts = [len(planned.experts_of(self.paged.loader.rank))] if _of_experts(planned) else []
        shape = [self.slots, *experts, self.rank]
        factors = (torch.zeros(*shape, size, dtype=self.dtype, device=device) for size in (a.shape[-1], b.shape[-2]))
        return LowRank(*factors)

    def local(self, planned: PlannedTensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of A [..., r, K] and B [..., N, r]."""
        rank, dim = self.paged.loader.rank, planned.dim
        if _of_experts(planned):
            held, dim = planned.experts_of(rank), None if dim is None else dim - 1
            if a.dim() == 3:
                a, b = a[held.start : held.stop], b[held.start : held.stop]
        if dim == 0:
            b = b.chunk(planned.parts, -2)[rank % planned.parts]
        elif dim == 1:
            a = a.chunk(planned.parts, -1)[rank % planned.parts]
        return a, b

    def forget(self) -> None:
        """Hold no adapter."""
        for site in self.sites.values():
            for slot in range(self.slots):
                site.reset_lora(slot)

    def tell(self, manager: Any) -> None:
        """Note which token of the step has which adapter, as vLLM's manager has it."""
        host, ids = adapters_of_tokens(manager, self.wrapper) or ([], self.adapters.ids)
        self.adapters.tell(host, ids)


def _linears(config: KimiK2Config, number: int) -> Iterator[tuple[str, list[tuple[int, ...]]]]:
    """Modules of a layer that adapters may touch, and whole sizes; of routed experts each projection's."""
    for name, shape in modules(config, number):
        if name == EXPERTS:
            yield name, [shape[:0:-1] if projection == "down_proj" else shape[1:] for projection in PROJECTIONS]
        elif len(shape) == 2 and name not in ("mlp.gate", "self_attn.kv_b_proj"):
            yield name, [shape]


def _of_experts(planned: PlannedTensor) -> bool:
    return ".mlp.experts." in planned.name


def _put(root: nn.Module, name: str, site: nn.Module) -> None:
    *path, last = name.split(".")
    for child in path:
        children = dict(root.named_children())
        if child not in children:
            children[child] = nn.ModuleDict()  # vLLM counts layers
            root.add_module(child, children[child])
        root = children[child]
    root.add_module(last, site)
