"""What the kernels of a decode step read of a layer's attention, and what both cores of LNC=2 read."""

from __future__ import annotations

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.target import Target
from kimi_k2.sharding.attention_tiles import NAME, OF_GROUP, SOURCES, in_place_of_linears
from kimi_k2.sharding.layout import Layout, PlannedTensor

CORES = 2  # of LNC
_NORMS = (".q_a_layernorm.weight", ".kv_a_layernorm.weight")
_QUERIES = (f".{NAME}.q_b.", f".{NAME}.w_uk.")
# Of a layer in the kernel of whole layers.
_OF_LAYERS = (
    ".early_router.residual_weight", ".early_router.heads_weight", ".router.e_score_correction_bias",
    ".post_attention_layernorm.weight",
)  # fmt: skip


def _in_one_kernel(config: KimiK2Config, layout: Layout, layer: int) -> bool:
    """Whether a layer is one of those whose step is one kernel."""
    return layout.layers and config.is_moe_layer(layer)


def reads_attention(config: KimiK2Config, layout: Layout, tensor: PlannedTensor, decode: bool) -> bool:
    """Whether a stage reads a tensor, if it is a weight of attention that tiles stand for, or one of those tiles."""
    kernel = decode and _in_one_kernel(config, layout, tensor.layer)
    if f".{NAME}." not in tensor.name:
        return not kernel or not any(f".{name}." in tensor.name for name in SOURCES)
    of_group = any(f".{name}." in tensor.name for name in OF_GROUP)
    if not kernel:  # tiles of float values are all that there is
        return in_place_of_linears(layout.attention_tiles(config)) and not of_group
    return not layout.query_group or of_group or not any(part in tensor.name for part in _QUERIES)


def times_read(config: KimiK2Config, target: Target, tensor: PlannedTensor) -> int:
    """How often a step reads a tensor: 2 where both cores of a kernel do."""
    name, layout = tensor.name, target.layout
    if not _in_one_kernel(config, layout, tensor.layer):
        return 1
    both = name.endswith((*_NORMS, *_OF_LAYERS)) or any(part in name for part in (*_QUERIES, f".{NAME}.w_uv."))
    # Where a group of ranks shares a cache each core has a half of o_proj.
    both |= f".{NAME}.o." in name and not layout.query_group
    return CORES if both else 1
