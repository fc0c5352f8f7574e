"""Which slice of which tensor goes to which rank, as data. Nothing else in the package decides it.

Targets:
    neuron: names and layouts of NeuronKimiK2ForCausalLM's state dict, cut as NxD's `shard_checkpoint` cuts it. Routed
        experts are [E, input, output]; gate and up lie side by side and are cut with stride 2.
    cuda: the checkpoint's own names and [output, input] layouts, routed experts stacked [E, output, input].
Attention, dense MLP, shared experts, embedding and head are split over all ranks; routed experts over `moe_ep` groups
of `moe_tp` ranks: rank r holds the experts of group r // moe_tp and slice r % moe_tp of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from kimi_k2.checkpoint.names import modules, routed_format
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.stored import StoredFormat, TensorSpec, format_of, unquantized
from kimi_k2.sharding.attention_tiles import (
    SOURCES,
    Cut,
    attention_tiles_tensors,
    check_sizes,
    check_stored,
    in_place_of_linears,
    shapes,
)
from kimi_k2.sharding.early_qkv_a import early_qkv_a_tensors, precedes_another
from kimi_k2.sharding.early_router import early_router_tensors
from kimi_k2.sharding.experts import ExpertFormat
from kimi_k2.sharding.layout import GLOBAL_LAYER, Layout, PlannedTensor, ShardingPlan


def make_plan(config: KimiK2Config, layout: Layout) -> ShardingPlan:
    """The plan of a model.

    Args:
        config: of the model.
        layout: ranks and formats.

    Raises:
        ConfigError: a size does not divide among the ranks, or a rank's slice would cut a scale block.
    """
    _check_divisible(config, layout)
    experts = layout.expert_format(config) if layout.target == "neuron" else None
    if experts is not None:
        if layout.layers and experts.shared is None:
            expected = "the shared expert in tiles, of 32 or 64 columns a rank"
            raise ConfigError(f"decode 'layers' needs {expected}", field="decode")
        if layout.attention_tiles(config):
            check_sizes(config)
            check_stored(config, layout.attention_tiles(config))
        if layout.query_group and layout.ranks > 1 and config.num_attention_heads != layout.ranks:
            expected = f"one head a rank ({layout.ranks}) with query_group"
            raise ConfigError(f"expected {expected}, got {config.num_attention_heads}", field="num_attention_heads")
    tiles = shapes(config, layout.ranks, layout.query_group) if layout.layers else {}
    tensors: list[PlannedTensor] = list(_global_tensors(config, layout))
    held = layout.held(config)
    for layer in range(config.num_hidden_layers):
        tensors += _neuron_layer(config, layout, layer, experts, tiles) if experts else _cuda_layer(held, layout, layer)
    plan = ShardingPlan(config, layout, tuple(tensors))
    for tensor in plan.tensors:
        if tensor.dim is not None and tensor.shape[tensor.dim] % (tensor.stride * tensor.parts):
            raise ConfigError(
                f"{tensor.name}: dimension {tensor.dim} of {list(tensor.shape)} cannot be cut into {tensor.parts}"
            )
    return plan


def without_nxdis(plan: ShardingPlan) -> ShardingPlan:
    """What of a plan for neuron the model of vllm-neuron's torch-native line holds."""
    return replace(plan, tensors=tuple(tensor for tensor in plan.tensors if tensor.name != "rank_util.rank"))


def _check_divisible(config: KimiK2Config, layout: Layout) -> None:
    for field, parts in (
        ("num_attention_heads", layout.dense),
        ("vocab_size", layout.dense),
        ("hidden_size", layout.dense),
        ("intermediate_size", layout.dense),
        ("n_routed_experts", layout.moe_ep),
        ("moe_intermediate_size", layout.dense),
    ):
        if getattr(config, field) % parts:
            raise ConfigError(f"{getattr(config, field)} does not divide among {parts} ranks", field=field)


def _global_tensors(config: KimiK2Config, layout: Layout) -> Iterator[PlannedTensor]:
    ranks, shape = layout.dense, (config.vocab_size, config.hidden_size)
    dtype, neuron = layout.dtype, layout.target == "neuron"
    root = "" if neuron else "model."
    if neuron:
        yield PlannedTensor("rank_util.rank", torch.int32, (ranks,), GLOBAL_LAYER, 0, 1, ranks)
    yield PlannedTensor(f"{root}embed_tokens.weight", dtype, shape, GLOBAL_LAYER, int(neuron), 1, ranks)
    yield PlannedTensor(f"{root}norm.weight", dtype, shape[1:], GLOBAL_LAYER)
    yield PlannedTensor("lm_head.weight", dtype, shape, GLOBAL_LAYER, 0, 1, ranks)


# Of Linears that ranks divide, the dimension that is cut.
_CUTS = {"q_b_proj": 0, "kv_b_proj": 0, "o_proj": 1, "gate_proj": 0, "up_proj": 0, "down_proj": 1}


def _linears(config: KimiK2Config, layer: int) -> list[tuple[str, tuple[int, int], int | None]]:
    """Of a layer's Linears outside the routed experts: name, shape, and what is cut; those that are not come first."""
    found = (
        (name, (shape[0], shape[1]), _CUTS.get(name.rpartition(".")[2]))
        for name, shape in modules(config, layer)
        if len(shape) == 2 and name != "mlp.gate"
    )
    return sorted(found, key=lambda one: one[2] is not None)


def _norms(config: KimiK2Config, layout: Layout, root: str, layer: int) -> Iterator[PlannedTensor]:
    for name, shape in modules(config, layer):
        if len(shape) == 1:
            yield PlannedTensor(f"{root}.{name}.weight", layout.dtype, shape, layer)


def _neuron_layer(
    config: KimiK2Config, layout: Layout, layer: int, experts: ExpertFormat, tiles: dict[str, tuple[Cut, Cut]]
) -> Iterator[PlannedTensor]:
    """A decoder layer's tensors under NeuronKimiK2ForCausalLM's names, experts [E, input, output]."""
    root, ranks, dtype = f"layers.{layer}", layout.ranks, layout.dtype
    yield from _norms(config, layout, root, layer)
    shape = (config.qkv_a_dim, config.hidden_size)
    yield PlannedTensor(f"{root}.self_attn.qkv_a_proj.weight", dtype, shape, layer, 0, 1, ranks)
    kind = layout.attention_tiles(config) if config.is_moe_layer(layer) else ""
    tiled = SOURCES if in_place_of_linears(kind) else ()
    for name, size, dim in _linears(config, layer):
        if dim is not None and name not in tiled and (experts.shared is None or "shared_experts" not in name):
            yield PlannedTensor(f"{root}.{name}.weight", dtype, size, layer, dim, 1, ranks)
    if not config.is_moe_layer(layer):
        return
    if kind:
        yield from attention_tiles_tensors(config, layout, layer, tiles)
    count, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    tp, ep = layout.moe_tp, layout.moe_ep
    yield PlannedTensor(f"{root}.mlp.router.linear_router.weight", dtype, (count, hidden), layer)
    yield PlannedTensor(f"{root}.mlp.router.e_score_correction_bias", torch.float32, (count,), layer)
    if layout.layers:
        yield from early_router_tensors(config, layout, layer)
        if precedes_another(config, layer):
            yield from early_qkv_a_tensors(config, layout, layer)
    yield from _stack(f"{root}.mlp.experts", experts, (count, width, hidden), dtype, layer, tp, ep)
    if experts.shared is not None:
        sizes = (1, width * config.n_shared_experts, hidden)
        yield from _stack(f"{root}.mlp.shared_experts", experts.shared, sizes, dtype, layer, ranks, 1)


def _stack(
    root: str, experts: ExpertFormat, sizes: tuple[int, int, int], dtype: torch.dtype, layer: int, tp: int, ep: int
) -> Iterator[PlannedTensor]:
    """A stack of experts, a suffix after the other, as NxD's modules hold them; sizes: experts, their width, hidden."""
    count, width, hidden = sizes
    up, down = experts.specs(width, hidden, dtype), experts.specs(hidden, width, dtype)
    for suffix in up:
        stored_dtype, (rows, columns) = up[suffix]
        fused, cut = experts.fused_shape(suffix, rows, columns)
        yield PlannedTensor(f"{root}.gate_up_proj.{suffix}", stored_dtype, (count, *fused), layer, cut + 1, 2, tp, ep)
        stored_dtype, (rows, columns) = down[suffix]
        dim = 1 if columns > 1 else None  # a scale of whole channels is every rank's
        yield PlannedTensor(f"{root}.down_proj.{suffix}", stored_dtype, (count, columns, rows), layer, dim, 1, tp, ep)


def _held(
    stored_format: StoredFormat, layout: Layout, module: str, shape: tuple[int, int], dim: int | None, parts: int
) -> Iterator[TensorSpec]:
    """A Linear's tensors, each cut along `dim` with its weight."""
    if layout.keeps:
        yield from stored_format.cut(module, *shape, dim, parts)
    else:
        yield TensorSpec(f"{module}.weight", layout.dtype, shape)


def _divided(spec: TensorSpec, dim: int | None, parts: int, stride: int = 1) -> tuple[int | None, int, int]:
    """Dimension, stride and parts of a cut; a scale with one value along `dim` is every rank's."""
    return (None, 1, parts) if dim is None or spec.shape[dim] == 1 < parts else (dim, stride, parts)


def _cuda_layer(config: KimiK2Config, layout: Layout, layer: int) -> Iterator[PlannedTensor]:
    """A decoder layer's tensors under the checkpoint's names, experts stacked [E, output, input].

    Raises:
        ConfigError: a rank's slice would cut a scale block.
    """
    root, ranks = f"model.layers.{layer}", layout.dense
    yield from _norms(config, layout, root, layer)
    for name, shape, dim in _linears(config, layer):
        parts = 1 if dim is None else ranks
        stored_format = format_of(config.quantization, f"{root}.{name}")
        for spec in _held(stored_format, layout, f"{root}.{name}", shape, dim, parts):
            yield PlannedTensor(*spec, layer, *_divided(spec, dim, parts))
    if not config.is_moe_layer(layer):
        return
    experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
    yield PlannedTensor(f"{root}.mlp.gate.weight", layout.dtype, (experts, hidden), layer)
    yield PlannedTensor(f"{root}.mlp.gate.e_score_correction_bias", torch.float32, (experts,), layer)
    for name, first, shape, dim, stride in (
        ("gate_up_proj", "gate_proj", (width, hidden), 0, 2),
        ("down_proj", "down_proj", (hidden, width), 1, 1),
    ):
        stored_format = routed_format(config, f"{root}.mlp.experts", name) if layout.keeps else unquantized()
        for spec in _held(stored_format, layout, f"{root}.mlp.experts.0.{first}", shape, dim, layout.moe_tp):
            fused = f"{root}.mlp.experts.{name}{spec.name.rpartition('.')[2].removeprefix('weight')}"
            stacked = (experts, stride * spec.shape[0], spec.shape[1])
            cut, sections, parts = _divided(spec, dim, layout.moe_tp, stride)
            cut = None if cut is None else cut + 1
            yield PlannedTensor(fused, spec.dtype, stacked, layer, cut, sections, parts, layout.moe_ep)
