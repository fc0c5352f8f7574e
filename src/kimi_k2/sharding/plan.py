"""Which slice of which tensor goes to which rank, as data. Nothing else in the package decides it.

Targets:
    neuron: names and layouts of NeuronKimiK2ForCausalLM's state dict, cut as NxD's `shard_checkpoint` cuts it. Routed
        experts are [E, input, output]; gate and up lie side by side and are cut with stride 2.
    cuda: the checkpoint's own names and [output, input] layouts, routed experts stacked [E, output, input].
Attention, dense MLP, shared experts, embedding and head are split over all ranks; routed experts over `moe_ep` groups
of `moe_tp` ranks: rank r holds the experts of group r // moe_tp and slice r % moe_tp of each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import TensorSpec, linear_specs
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError
from kimi_k2.quantization.config import Fp8BlockQuantization, Int4GroupQuantization
from kimi_k2.quantization.fp8_block import block_grid

Target = Literal["neuron", "cuda"]
ExpertOutput = Literal["bf16", "blockwise", "per_channel", "stored"]
Region = tuple[slice, ...]
GLOBAL_LAYER = -1  # embedding, final norm and head


@dataclass(frozen=True)
class Layout:
    """Ranks and formats of a pre-sharded checkpoint.

    Args:
        moe_tp: ranks that share an expert.
        moe_ep: groups that the experts are divided among.
        target: whose names and layouts.
        experts: format of the routed experts. `stored` keeps the checkpoint's (cuda only, whole model).
        dtype: of float weights for neuron and for cuda with `bf16`.
        spmd_rank: write the rank numbers that NxD's expert MLPs hold; None for when they do by default (EP above 1).
    """

    moe_tp: int
    moe_ep: int = 1
    target: Target = "neuron"
    experts: ExpertOutput = "per_channel"
    dtype: torch.dtype = torch.bfloat16
    spmd_rank: bool | None = None

    def __post_init__(self) -> None:
        for field in ("moe_tp", "moe_ep"):
            if getattr(self, field) < 1:
                raise ConfigError(f"expected a positive number, got {getattr(self, field)}", field=field)
        allowed = ("bf16", "stored") if self.target == "cuda" else ("bf16", "blockwise", "per_channel")
        if self.experts not in allowed:
            raise ConfigError(f"expected {' or '.join(allowed)} for {self.target}, got {self.experts}", field="experts")

    @property
    def ranks(self) -> int:
        """Number of files."""
        return self.moe_tp * self.moe_ep

    @property
    def has_spmd_rank(self) -> bool:
        """Whether expert MLPs hold their rank."""
        return self.target == "neuron" and (self.moe_ep > 1 if self.spmd_rank is None else self.spmd_rank)


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the output and how it is cut.

    Attributes:
        name, dtype, shape: of the whole tensor, before it is cut.
        layer: decoder layer, or GLOBAL_LAYER.
        dim: dimension cut over `parts` ranks; None if it is not.
        stride: equal sections of `dim`, each of which is cut (2 for gate and up side by side).
        parts: ranks that share a copy.
        expert_groups: groups that dimension 0 is divided among.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layer: int
    dim: int | None = None
    stride: int = 1
    parts: int = 1
    expert_groups: int = 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on each rank."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] //= self.parts
        if self.expert_groups > 1:
            shape[0] //= self.expert_groups
        return tuple(shape)

    @property
    def kind(self) -> str:
        """In words, for a table."""
        words = [] if self.dim is None else [f"dim {self.dim} / {self.parts}"]
        if self.stride > 1:
            words.append(f"stride {self.stride}")
        if self.expert_groups > 1:
            words.append(f"experts / {self.expert_groups}")
        return ", ".join(words) or "replicated"

    def spec(self) -> TensorSpec:
        """Name, dtype and shape in a rank's file."""
        return TensorSpec(self.name, self.dtype, self.local_shape)

    def experts_of(self, rank: int) -> range:
        """Rows of dimension 0 on `rank` if experts are divided; all of them otherwise."""
        count = self.shape[0] // self.expert_groups
        first = rank // self.parts % self.expert_groups * count
        return range(first, first + count)

    def cuts(self, rank: int) -> list[slice]:
        """Slices of dimension `dim` that rank holds, in order."""
        assert self.dim is not None
        section = self.shape[self.dim] // self.stride
        width, part = section // self.parts, rank % self.parts
        return [slice(s * section + part * width, s * section + (part + 1) * width) for s in range(self.stride)]

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Of one expert by rank: [1, ...] where the ranks that share it all hold the same, else [parts, ...]."""
        return (1 if self.dim is None else self.parts, *self.local_shape[1:])

    def by_rank(self, expert: Tensor) -> Tensor:
        """One expert's whole tensor to `expert_shape`, contiguous: what each rank of those that share it holds."""
        if self.dim is None:
            return expert.contiguous().unsqueeze(0)
        dim = self.dim - 1
        cut = expert.unflatten(dim, (self.stride, self.parts, -1)).movedim(dim + 1, 0)
        return cut.contiguous().flatten(dim + 1, dim + 2)

    def regions(self, rank: int) -> list[Region]:
        """Boxes of the whole tensor that `rank` holds; concatenated along `dim` they are its local tensor."""
        whole = [slice(0, size) for size in self.shape]
        if self.expert_groups > 1:
            experts = self.experts_of(rank)
            whole[0] = slice(experts.start, experts.stop)
        if self.dim is None:
            return [tuple(whole)]
        return [(*whole[: self.dim], cut, *whole[self.dim + 1 :]) for cut in self.cuts(rank)]


@dataclass(frozen=True)
class ShardingPlan:
    """All tensors of all ranks, in file order."""

    config: KimiK2Config
    layout: Layout
    tensors: tuple[PlannedTensor, ...]

    def layer(self, layer: int) -> list[PlannedTensor]:
        """Tensors of one layer."""
        return [tensor for tensor in self.tensors if tensor.layer == layer]

    def check(self) -> None:
        """Prove that every element of every tensor is in one rank's file, or in equally many if it is replicated.

        Raises:
            CheckpointError: an element is missing or belongs to two different slices.
        """
        seen = set()
        for tensor in self.tensors:
            key = (tensor.shape, tensor.dim, tensor.stride, tensor.parts, tensor.expert_groups)
            if key not in seen:
                seen.add(key)
                _check_cover(tensor, self.layout.ranks)


def _check_cover(tensor: PlannedTensor, ranks: int) -> None:
    copies: dict[tuple[tuple[int, int], ...], int] = {}
    for rank in range(ranks):
        for region in tensor.regions(rank):
            box = tuple((cut.start, cut.stop) for cut in region)
            copies[box] = copies.get(box, 0) + 1
    if len(set(copies.values())) != 1:
        raise CheckpointError("slices are held by different numbers of ranks", tensor=tensor.name)
    covered = sum(math.prod(stop - start for start, stop in box) for box in copies)
    if covered != math.prod(tensor.shape):
        raise CheckpointError(f"slices hold {covered} of {math.prod(tensor.shape)} elements", tensor=tensor.name)
    for a, b in itertools.combinations(copies, 2):
        if all(max(x[0], y[0]) < min(x[1], y[1]) for x, y in zip(a, b, strict=True)):
            raise CheckpointError(f"slices {a} and {b} overlap", tensor=tensor.name)


def expert_block(config: KimiK2Config, layout: Layout) -> int:
    """Side of a scale block for neuron: the largest that divides the checkpoint's 128 and a rank's share of an expert.

    A rank's width may be less than 128 (64 rows at 32 ranks, 32 at 64); scales are then repeated for smaller blocks, so
    that no block crosses a rank's border.
    """
    return math.gcd(128, config.moe_intermediate_size // layout.moe_tp)


def make_plan(config: KimiK2Config, layout: Layout) -> ShardingPlan:
    """The plan of a model.

    Raises:
        ConfigError: a size does not divide among the ranks, or a rank's slice would cut a scale block.
    """
    _check_divisible(config, layout)
    builder = _neuron_layer if layout.target == "neuron" else _cuda_layer
    tensors: list[PlannedTensor] = list(_global_tensors(config, layout))
    for layer in range(config.num_hidden_layers):
        tensors += builder(config, layout, layer)
    plan = ShardingPlan(config, layout, tuple(tensors))
    for tensor in plan.tensors:
        if tensor.dim is not None and tensor.shape[tensor.dim] % (tensor.stride * tensor.parts):
            raise ConfigError(
                f"{tensor.name}: dimension {tensor.dim} of {list(tensor.shape)} cannot be cut into {tensor.parts}"
            )
    return plan


def _check_divisible(config: KimiK2Config, layout: Layout) -> None:
    for field, parts in (
        ("num_attention_heads", layout.ranks),
        ("vocab_size", layout.ranks),
        ("hidden_size", layout.ranks),
        ("intermediate_size", layout.ranks),
        ("n_routed_experts", layout.moe_ep),
        ("moe_intermediate_size", layout.ranks),
    ):
        if getattr(config, field) % parts:
            raise ConfigError(f"{getattr(config, field)} does not divide among {parts} ranks", field=field)


def _global_tensors(config: KimiK2Config, layout: Layout) -> Iterator[PlannedTensor]:
    ranks, shape = layout.ranks, (config.vocab_size, config.hidden_size)
    dtype = layout.dtype
    if layout.target == "cuda":
        yield PlannedTensor("model.embed_tokens.weight", dtype, shape, GLOBAL_LAYER, 0, 1, ranks)
        yield PlannedTensor("model.norm.weight", dtype, shape[1:], GLOBAL_LAYER)
        yield PlannedTensor("lm_head.weight", dtype, shape, GLOBAL_LAYER, 0, 1, ranks)
        return
    yield PlannedTensor("rank_util.rank", torch.int32, (ranks,), GLOBAL_LAYER, 0, 1, ranks)
    yield PlannedTensor("embed_tokens.weight", dtype, shape, GLOBAL_LAYER, 1, 1, ranks)
    yield PlannedTensor("norm.weight", dtype, shape[1:], GLOBAL_LAYER)
    yield PlannedTensor("lm_head.weight", dtype, shape, GLOBAL_LAYER, 0, 1, ranks)


# Linears outside the routed experts: name, dimension of [output, input] that is cut.
def _linears(config: KimiK2Config, layer: int) -> Iterator[tuple[str, int, int, int | None]]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    yield "self_attn.q_b_proj", heads * config.qk_head_dim, config.q_lora_rank, 0
    yield "self_attn.kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank, 0
    yield "self_attn.o_proj", hidden, heads * config.v_head_dim, 1
    mlp, width = "mlp", config.intermediate_size
    if config.is_moe_layer(layer):
        if not config.n_shared_experts:
            return
        mlp, width = "mlp.shared_experts", config.moe_intermediate_size * config.n_shared_experts
    yield f"{mlp}.gate_proj", width, hidden, 0
    yield f"{mlp}.up_proj", width, hidden, 0
    yield f"{mlp}.down_proj", hidden, width, 1


def _norms(config: KimiK2Config) -> dict[str, int]:
    return {
        "input_layernorm": config.hidden_size,
        "self_attn.q_a_layernorm": config.q_lora_rank,
        "self_attn.kv_a_layernorm": config.kv_lora_rank,
        "post_attention_layernorm": config.hidden_size,
    }


def _neuron_layer(config: KimiK2Config, layout: Layout, layer: int) -> Iterator[PlannedTensor]:
    root, ranks, dtype = f"layers.{layer}", layout.ranks, layout.dtype
    for name, size in _norms(config).items():
        yield PlannedTensor(f"{root}.{name}.weight", dtype, (size,), layer)
    shape = (config.q_lora_rank + config.cache_dim, config.hidden_size)
    yield PlannedTensor(f"{root}.self_attn.qkv_a_proj.weight", dtype, shape, layer, 0, 1, ranks)
    for name, rows, columns, dim in _linears(config, layer):
        yield PlannedTensor(f"{root}.{name}.weight", dtype, (rows, columns), layer, dim, 1, ranks)
    if not config.is_moe_layer(layer):
        return
    experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    tp, ep = layout.moe_tp, layout.moe_ep
    yield PlannedTensor(f"{root}.mlp.router.linear_router.weight", dtype, (experts, hidden), layer)
    yield PlannedTensor(f"{root}.mlp.router.e_score_correction_bias", torch.float32, (experts,), layer)
    mlps = f"{root}.mlp.expert_mlps"
    if layout.has_spmd_rank:
        yield PlannedTensor(f"{mlps}.spmd_rank.rank", torch.int32, (ranks,), layer, 0, 1, ranks)
        if ep > 1:
            yield PlannedTensor(
                f"{mlps}.spmd_rank.local_expert_indices", torch.int32, (ranks, experts // ep), layer, 0, 1, ranks
            )
    code = layout.dtype if layout.experts == "bf16" else torch.float8_e4m3fn
    up, down = f"{mlps}.mlp_op.gate_up_proj", f"{mlps}.mlp_op.down_proj"
    yield PlannedTensor(f"{up}.weight", code, (experts, hidden, 2 * width), layer, 2, 2, tp, ep)
    yield PlannedTensor(f"{down}.weight", code, (experts, width, hidden), layer, 1, 1, tp, ep)
    if layout.experts == "per_channel":
        yield PlannedTensor(f"{up}.scale", torch.float32, (experts, 1, 2 * width), layer, 2, 2, tp, ep)
        yield PlannedTensor(f"{down}.scale", torch.float32, (experts, 1, hidden), layer, None, 1, tp, ep)
    elif layout.experts == "blockwise":
        block = expert_block(config, layout)
        rows, columns = block_grid((width, hidden), (block, block))
        yield PlannedTensor(f"{up}.scale", torch.float32, (experts, columns, 2 * rows), layer, 2, 2, tp, ep)
        yield PlannedTensor(f"{down}.scale", torch.float32, (experts, rows, columns), layer, 1, 1, tp, ep)


def _stored_specs(config: KimiK2Config, layout: Layout, module: str, rows: int, columns: int) -> Iterator[TensorSpec]:
    """A Linear's tensors in the cuda output, in which every scale can be cut with its weight."""
    if layout.experts == "stored":
        yield from (spec for spec in linear_specs(config, module, rows, columns) if not spec.name.endswith("_shape"))
    else:
        yield TensorSpec(f"{module}.weight", layout.dtype, (rows, columns))


def _check_blocks(config: KimiK2Config, module: str, size: int, dim: int, parts: int) -> None:
    quantization = config.quantization
    if quantization is None or not quantization.quantizes(module):
        return
    if isinstance(quantization, Int4GroupQuantization):
        block = quantization.group_size if dim else 1
    else:
        assert isinstance(quantization, Fp8BlockQuantization)
        block = quantization.weight_block_size[dim]
    if parts > 1 and size // parts % block:
        raise ConfigError(f"{module}: a rank's {size // parts} of dimension {dim} cut a scale block of {block}")


def _cuda_layer(config: KimiK2Config, layout: Layout, layer: int) -> Iterator[PlannedTensor]:
    root, ranks = f"model.layers.{layer}", layout.ranks
    stored = layout.experts == "stored"
    for name, size in _norms(config).items():
        yield PlannedTensor(f"{root}.{name}.weight", layout.dtype, (size,), layer)
    replicated = (
        ("self_attn.q_a_proj", config.q_lora_rank, config.hidden_size, None),
        ("self_attn.kv_a_proj_with_mqa", config.cache_dim, config.hidden_size, None),
    )
    for name, rows, columns, dim in (*replicated, *_linears(config, layer)):
        module = f"{root}.{name}"
        if stored and dim is not None:
            _check_blocks(config, module, (rows, columns)[dim], dim, ranks)
        for spec in _stored_specs(config, layout, module, rows, columns):
            yield PlannedTensor(*spec, layer, dim, 1, 1 if dim is None else ranks)
    if not config.is_moe_layer(layer):
        return
    experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    yield PlannedTensor(f"{root}.mlp.gate.weight", layout.dtype, (experts, hidden), layer)
    yield PlannedTensor(f"{root}.mlp.gate.e_score_correction_bias", torch.float32, (experts,), layer)
    module = f"{root}.mlp.experts.0"
    if stored:
        _check_blocks(config, f"{module}.gate_proj", width, 0, layout.moe_tp)
        _check_blocks(config, f"{module}.down_proj", width, 1, layout.moe_tp)
    for name, rows, columns, dim, stride in (
        ("gate_up_proj", width, hidden, 1, 2),
        ("down_proj", hidden, width, 2, 1),
    ):
        part = f"{module}.{name}".replace("gate_up", "gate")
        for spec in _stored_specs(config, layout, part, rows, columns):
            fused = f"{root}.mlp.experts.{name}{spec.name.rpartition('.')[2].removeprefix('weight')}"
            shape = (experts, stride * spec.shape[0], spec.shape[1])
            yield PlannedTensor(fused, spec.dtype, shape, layer, dim, stride, layout.moe_tp, layout.moe_ep)
