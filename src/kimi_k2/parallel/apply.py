"""Make the plain model one rank's part of it: local shapes from the sharding plan, sums where ranks must agree.

Attention heads, dense MLPs, the shared expert, embedding and head are cut over all ranks; routed experts over `moe_ep`
groups of `moe_tp` ranks. So each half of a layer ends in one all-reduce over all ranks, and the head in one all-gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, TensorDtypeError, TensorShapeError
from kimi_k2.model.decoder import DecoderLayer, KimiK2ForCausalLM
from kimi_k2.model.linear import Embedding
from kimi_k2.model.moe import Experts, MoE
from kimi_k2.ops.collective import Ranks, all_reduce, gather_last
from kimi_k2.ops.embedding import embedding
from kimi_k2.sharding.layout import Layout, PlannedTensor
from kimi_k2.sharding.manifest import WEIGHTS, check_made_for, rank_file_name
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.verify import open_rank_file


class AllReduce:
    """Callable sum over the ranks of a group.

    Args:
        group: None for the default one.
        active: False makes it the identity.
        push: False keeps to torch.distributed's all_reduce.
    """

    def __init__(self, group: dist.ProcessGroup | None, active: bool = True, push: bool = True) -> None:
        self.ranks, self.active = Ranks(group, push), active

    def __call__(self, x: Tensor) -> Tensor:
        """Sum of all ranks' x, of any shape; x may be overwritten."""
        return all_reduce(x.contiguous(), self.ranks) if self.active else x

    @contextmanager
    def alone(self) -> Iterator[None]:
        """The identity meanwhile: what a rank tries by itself waits for no other."""
        active, self.active = self.active, False
        try:
            yield
        finally:
            self.active = active


class VocabParallelEmbedding(Embedding):
    """Rows `first .. first + n - 1` of the embedding; zeros for other ranks' tokens, summed over ranks."""

    def __init__(self, weight: Tensor, first: int, reduce: AllReduce) -> None:
        super().__init__(weight)
        self.first, self.reduce = first, reduce

    def forward(self, input_ids: Tensor) -> Tensor:
        """int64 [B, S] to [B, S, H]."""
        return self.reduce(embedding(input_ids, self.weight, self.first))


def parallelize(
    model: KimiK2ForCausalLM,
    layout: Layout,
    rank: int,
    *,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
    communicate: bool = True,
    layers: range | None = None,
    redundant: int = 0,
) -> KimiK2ForCausalLM:
    """Cut a model made on the meta device to the part of `rank`; its weights are then uninitialised, on `device`.

    Args:
        model: from `KimiK2ForCausalLM(config, ...)` under `torch.device("meta")`, with `keep_quantized` if the layout's
            experts are `stored`.
        layout: of the ranks, `target="cuda"`.
        rank: which part.
        device: where the part lives.
        group: of all ranks, of this one's replica; None for the default one.
        layers: those of a pipeline's stage; others stay on the meta device. None for all.
        communicate: False leaves the sums out: one rank stands for many in a benchmark, with meaningless results.
        redundant: routed experts that a layer's ranks hold beyond the model's, shared out as those are.

    Returns:
        The same model.

    Raises:
        ConfigError: the layout is not cuda's, a size does not divide, or the group's size is not the layout's.
    """
    if layout.target != "cuda":
        raise ConfigError(f"expected cuda, got {layout.target}", field="target")
    communicate = communicate and layout.dense > 1  # one rank needs no process group
    if communicate and dist.get_world_size(group) != layout.dense:
        raise ConfigError(f"{layout.dense} ranks, but the group has {dist.get_world_size(group)}", field="moe_tp")
    if redundant % layout.moe_ep:
        raise ConfigError(f"{redundant} do not divide among {layout.moe_ep} ranks", field="redundant")
    for planned in make_plan(model.config, layout).of_layers(layers):
        _replace(model, planned, device, redundant // layout.moe_ep if ".experts." in planned.name else 0)
    reduce = AllReduce(group, communicate)
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.self_attn.register_forward_hook(_summed(reduce))
        layer.mlp.register_forward_hook(_summed(reduce))
        if isinstance(layer.mlp, MoE):
            _cut_experts(layer.mlp.experts, layout, rank, redundant)
    rows = model.model.embed_tokens.weight
    model.model.embed_tokens = VocabParallelEmbedding(rows, rank % layout.dense * rows.shape[0], reduce)
    if reduce.active:
        model.register_forward_hook(lambda module, arguments, logits: gather_last(logits, group))
    return model


def _replace(model: nn.Module, planned: PlannedTensor, device: torch.device | str, more: int) -> None:
    module, _, name = planned.name.rpartition(".")
    owner = model.get_submodule(module)
    old = getattr(owner, name, None)
    if old is None:
        raise ConfigError(f"{planned.name} is planned, but the model lacks it: keep_quantized differs from the layout")
    rows, *sizes = planned.local_shape
    local = torch.empty(rows + more, *sizes, dtype=old.dtype, device=device)
    if tuple(old.shape) != planned.shape:
        raise ConfigError(
            f"{planned.name} is {list(old.shape)}, planned {list(planned.shape)}: keep_quantized differs?"
        )
    setattr(owner, name, nn.Parameter(local, requires_grad=False) if isinstance(old, nn.Parameter) else local)


def _summed(reduce: AllReduce) -> Any:
    return lambda module, arguments, output: reduce(output)


def _cut_experts(experts: Experts, layout: Layout, rank: int, redundant: int) -> None:
    experts.total_experts += redundant
    experts.num_experts = experts.total_experts // layout.moe_ep
    experts.first_expert = rank // layout.moe_tp * experts.num_experts


def load_rank(
    directory: str | Path,
    config: KimiK2Config,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> KimiK2ForCausalLM:
    """The part of `rank`, loaded.

    Args:
        directory: output of `kimi-k2 convert --target cuda`.
        config: of the checkpoint that was converted.
        layout: that it was converted for.
        rank: which part.
        dtype: of activations and float weights.
        device: where the part lives.

    Raises:
        ConfigError: converted from another model or for another layout.
        CheckpointError: (subclasses) the manifest or the rank's file is missing or damaged; every tensor's checksum is
            compared.
    """
    check_made_for(directory, config, layout)
    with torch.device("meta"):
        model = KimiK2ForCausalLM(layout.held(config), dtype=dtype, keep_quantized=layout.keeps)
    parallelize(model, layout, rank, device=device)
    path = Path(directory) / WEIGHTS / rank_file_name(rank)
    with open_rank_file(Path(directory), rank) as read:
        for planned in make_plan(config, layout).tensors:
            stored = read(planned.name)
            module, _, name = planned.name.rpartition(".")
            target = getattr(model.get_submodule(module), name)
            if stored.shape != target.shape:
                raise TensorShapeError(
                    f"is {list(stored.shape)}, expected {list(target.shape)}", file=path, tensor=planned.name
                )
            if stored.dtype != planned.dtype:
                raise TensorDtypeError(f"is {stored.dtype}, expected {planned.dtype}", file=path, tensor=planned.name)
            target.copy_(stored)
    model.prepare()
    return model.eval()
