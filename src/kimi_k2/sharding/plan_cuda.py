"""A decoder layer's tensors for GPUs: the checkpoint's names, experts stacked [E, output, input]."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kimi_k2.checkpoint.names import TensorSpec, linear_specs
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.config import Fp8BlockQuantization, Int4GroupQuantization
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.modules import linears, norms
from kimi_k2.sharding.planned import PlannedTensor


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


def cuda_layer(config: KimiK2Config, layout: Layout, layer: int) -> Iterator[PlannedTensor]:
    """All tensors of decoder layer `layer`.

    Raises:
        ConfigError: a rank's slice would cut a scale block.
    """
    root, ranks = f"model.layers.{layer}", layout.ranks
    stored = layout.experts == "stored"
    for name, size in norms(config).items():
        yield PlannedTensor(f"{root}.{name}.weight", layout.dtype, (size,), layer)
    replicated = (
        ("self_attn.q_a_proj", config.q_lora_rank, config.hidden_size, None),
        ("self_attn.kv_a_proj_with_mqa", config.cache_dim, config.hidden_size, None),
    )
    for name, rows, columns, dim in (*replicated, *linears(config, layer)):
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
