"""How far experts that are stored in another format than the checkpoint's are from it, and what would be closer."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.target import Target
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.sharding.errors import ConversionError
from kimi_k2.sharding.experts.format import Matrix, expert_formats
from kimi_k2.sharding.experts.tiled import PARTITIONS
from nki_emulator.rates import TRAINIUM2

_SLOTS_A_CORE = 4  # experts of a token that a core of LNC=2 adds up
_SCALE_BYTES = 2  # INT4's scales are BF16


def stored_form(config: KimiK2Config, target: Target, expert_weights: int) -> dict[str, Any] | None:
    """Of INT4 experts on Neuron in a quantized format; None for others, which keep the checkpoint's values.

    Args:
        config: of the model.
        target: of the deployment.
        expert_weights: a rank's bytes of them, without scales.

    Returns:
        Name of the format; `relative_l2` of its weights to the checkpoint's, computed on one random matrix; of a form
        without error, in tiles, INT4 values in FP8 beside their own scales: `exact_bytes` that it adds to a rank and
        `exact_seconds_a_layer` of the Vector Engine, modelled.
    """
    source, layout = config.format_of_experts(), target.layout
    held = expert_formats().get(layout.experts) if target.is_neuron else None
    if not isinstance(source, Int4GroupFormat) or held is None or held.quantization_type is None:
        return None
    rows, columns = min(PARTITIONS, config.moe_intermediate_size), config.hidden_size
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    error = ConversionError()
    matrix = Matrix(source.quantize(weight), source, rows, columns)
    held.for_layout(config, layout).convert(matrix, torch.bfloat16, error)
    exact_bytes = expert_weights * _SCALE_BYTES // source.group_size
    # Of gate and up each group's product is scaled (two operands) and added, in place of each block of 128's.
    products = columns // source.group_size - columns // PARTITIONS
    pairs = _SLOTS_A_CORE * 2 * config.moe_intermediate_size // (layout.moe_tp * PARTITIONS)
    cycles = 3 * products * max(pairs, 1)
    return {
        "format": layout.experts,
        "relative_l2": error.relative_l2,
        "exact_bytes": exact_bytes,
        "exact_seconds_a_layer": cycles / dict(TRAINIUM2.hertz)["vector"] if held.tiles else None,
    }


def print_stored_form(form: dict[str, Any], console: Console) -> None:
    """In two lines."""
    console.print(
        f"INT4 experts as {form['format']}: {100 * form['relative_l2']:.1f} % of the weights' norm off the checkpoint"
        " (computed on a random matrix); shared expert and attention as the checkpoint has them",
        highlight=False,
    )
    if form["exact_seconds_a_layer"] is not None:
        console.print(
            "  without error, INT4 values in FP8 beside their own scales in BF16 (not implemented):"
            f" {form['exact_bytes'] / 1e9:.2f} GB more a rank, and {form['exact_seconds_a_layer'] * 1e6:.1f} us more of"
            " the Vector Engine a layer (modelled)",
            highlight=False,
        )
