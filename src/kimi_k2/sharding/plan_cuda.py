"""A decoder layer's tensors for GPUs: the checkpoint's names, experts stacked [E, output, input]."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_k2.checkpoint.names import routed_format
from kimi_k2.config import KimiK2Config
from kimi_k2.quantization.stored import StoredFormat, TensorSpec, format_of, unquantized
from kimi_k2.sharding.layout import STORED, Layout
from kimi_k2.sharding.modules import linears, norms
from kimi_k2.sharding.planned import PlannedTensor


def _held(
    held: StoredFormat, layout: Layout, module: str, shape: tuple[int, int], dim: int | None, parts: int
) -> Iterator[TensorSpec]:
    """A Linear's tensors, each cut along `dim` with its weight."""
    if layout.experts == STORED:
        yield from held.cut(module, *shape, dim, parts)
    else:
        yield TensorSpec(f"{module}.weight", layout.dtype, shape)


def _divided(spec: TensorSpec, dim: int | None, parts: int, stride: int = 1) -> tuple[int | None, int, int]:
    """Dimension, stride and parts of a cut; a scale with one value along `dim` is every rank's."""
    return (None, 1, parts) if dim is None or spec.shape[dim] == 1 < parts else (dim, stride, parts)


def cuda_layer(config: KimiK2Config, layout: Layout, layer: int) -> Iterator[PlannedTensor]:
    """All tensors of decoder layer `layer`.

    Raises:
        ConfigError: a rank's slice would cut a scale block.
    """
    root, ranks = f"model.layers.{layer}", layout.dense
    for name, size in norms(config).items():
        yield PlannedTensor(f"{root}.{name}.weight", layout.dtype, (size,), layer)
    replicated = (
        ("self_attn.q_a_proj", config.q_lora_rank, config.hidden_size, None),
        ("self_attn.kv_a_proj_with_mqa", config.cache_dim, config.hidden_size, None),
    )
    for name, rows, columns, dim in (*replicated, *linears(config, layer)):
        parts = 1 if dim is None else ranks
        held = format_of(config.quantization, f"{root}.{name}")
        for spec in _held(held, layout, f"{root}.{name}", (rows, columns), dim, parts):
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
        held = routed_format(config, f"{root}.mlp.experts", name) if layout.experts == STORED else unquantized()
        for spec in _held(held, layout, f"{root}.mlp.experts.0.{first}", shape, dim, layout.moe_tp):
            fused = f"{root}.mlp.experts.{name}{spec.name.rpartition('.')[2].removeprefix('weight')}"
            stacked = (experts, stride * spec.shape[0], spec.shape[1])
            cut, sections, parts = _divided(spec, dim, layout.moe_tp, stride)
            cut = None if cut is None else cut + 1
            yield PlannedTensor(fused, spec.dtype, stacked, layer, cut, sections, parts, layout.moe_ep)
