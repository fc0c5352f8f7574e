"""Which tensors a Kimi-K2 checkpoint holds: names, shapes and dtypes, from the configuration alone.

Names are those of `spellings`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.stored import StoredFormat, TensorSpec, format_of

# Present in published checkpoints but no part of the language model: inv_freq is a leftover that even has
# the wrong size, the others belong to K2.5's vision tower.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|^(vision_tower|mm_projector|multi_modal_projector)\.")

STACKED = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
EXPERT = re.compile(r"^(?P<moe>model\.layers\.\d+\.mlp)\.experts\.(?P<expert>\d+)\.(?P<proj>\w+)\.(?P<kind>\w+)$")
LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def beside_weights(stored_format: StoredFormat, name: str) -> bool:
    """Whether a tensor is a scale of activations or of the cache, which stay as they are here; its module's format."""
    suffix = name.rpartition(".")[2]
    return suffix in stored_format.unused or (suffix in ("k_scale", "v_scale") and ".self_attn." in name)


def routed_format(config: KimiK2Config, experts: str, projection: str) -> StoredFormat:
    """The one format of all routed experts of a layer, which are stacked as they are stored.

    Args:
        config: of the model.
        experts: `model.layers.3.mlp.experts`.
        projection: `gate_up_proj` or `down_proj`.

    Raises:
        ConfigError: they are stored in several.
    """
    return _routed_format(config.quantization, config.n_routed_experts, experts, projection)


@lru_cache(maxsize=512)  # a plan of many layouts asks for each layer many times, and a layer has 1,152 names
def _routed_format(
    quantization: StoredFormat | None, n_routed_experts: int, experts: str, projection: str
) -> StoredFormat:
    projections = ("gate_proj", "up_proj") if projection == "gate_up_proj" else (projection,)
    first = format_of(quantization, f"{experts}.0.{projections[0]}")
    if quantization is None:
        return first
    for expert in range(n_routed_experts):
        for name in projections:
            format_ = format_of(quantization, f"{experts}.{expert}.{name}")
            if format_ is not first and format_ != first:
                raise ConfigError(
                    f"{experts}.{expert}.{name} is stored as {format_.name}, {experts}.0.{projections[0]} as"
                    f" {first.name}; expected one format to keep as stored:"
                    " dequantize them, or convert with --experts bf16",
                    field="quantization_config",
                )
    return first


def _mlp(module: str, width: int, hidden: int) -> Iterator[tuple[str, tuple[int, int]]]:
    yield from ((f"{module}.{name}_proj", (width, hidden)) for name in ("gate", "up"))
    yield f"{module}.down_proj", (hidden, width)


def modules(config: KimiK2Config, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Modules of decoder layer `layer` (from 0) by name, in checkpoint order, and the shapes of their weights.

    [size] of norms, [rows, columns] of Linears and the router, [experts, width, hidden] of the routed experts.
    """
    heads, hidden, queries, rank = (
        config.num_attention_heads, config.hidden_size, config.q_lora_rank, config.kv_lora_rank,
    )  # fmt: skip
    yield "input_layernorm", (hidden,)
    yield "self_attn.q_a_proj", (queries, hidden)
    yield "self_attn.q_a_layernorm", (queries,)
    yield "self_attn.q_b_proj", (heads * config.qk_head_dim, queries)
    yield "self_attn.kv_a_proj_with_mqa", (config.cache_dim, hidden)
    yield "self_attn.kv_a_layernorm", (rank,)
    yield "self_attn.kv_b_proj", (heads * (config.qk_nope_head_dim + config.v_head_dim), rank)
    yield "self_attn.o_proj", (hidden, heads * config.v_head_dim)
    yield "post_attention_layernorm", (hidden,)
    if not config.is_moe_layer(layer):
        yield from _mlp("mlp", config.intermediate_size, hidden)
        return
    yield "mlp.gate", (config.n_routed_experts, hidden)
    yield "mlp.experts", (config.n_routed_experts, config.moe_intermediate_size, hidden)
    if config.n_shared_experts:
        yield from _mlp("mlp.shared_experts", config.moe_intermediate_size * config.n_shared_experts, hidden)


def layer_specs(config: KimiK2Config, layer: int) -> Iterator[TensorSpec]:
    """The stored tensors of decoder layer `layer` (from 0)."""
    for name, shape in modules(config, layer):
        module = f"model.layers.{layer}.{name}"
        if name == "mlp.experts":
            count, width, hidden = shape
            for expert in range(count):
                for linear, sides in _mlp(f"{module}.{expert}", width, hidden):
                    yield from format_of(config.quantization, linear).specs(linear, *sides)
        elif len(shape) == 2 and name != "mlp.gate":
            yield from format_of(config.quantization, module).specs(module, *shape)
        else:
            yield TensorSpec(f"{module}.weight", torch.bfloat16, shape)
            if name == "mlp.gate":
                yield TensorSpec(f"{module}.e_score_correction_bias", torch.float32, shape[:1])


def expected_tensors(config: KimiK2Config) -> Iterator[TensorSpec]:
    """Every tensor of the language model, in checkpoint order."""
    embedding = (config.vocab_size, config.hidden_size)
    yield TensorSpec("model.embed_tokens.weight", torch.bfloat16, embedding)
    for layer in range(config.num_hidden_layers):
        yield from layer_specs(config, layer)
    yield TensorSpec("model.norm.weight", torch.bfloat16, (config.hidden_size,))
    yield TensorSpec("lm_head.weight", torch.bfloat16, embedding)


VISION = re.compile(r"^(vision_tower|mm_projector)\.")


def vision_tensors(config: KimiK2Config) -> Iterator[TensorSpec]:
    """Every tensor of the tower and the projector, in the order of the computation; none if there is no tower."""
    vision = config.vision
    if vision is None:
        return
    width, patch = vision.hidden_size, vision.patch_size

    def tensor(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, torch.bfloat16, shape)

    def affine(name: str, rows: int, *columns: int) -> Iterator[TensorSpec]:
        yield tensor(f"{name}.weight", rows, *columns)
        yield tensor(f"{name}.bias", rows)

    yield from affine("vision_tower.patch_embed.proj", width, 3, patch, patch)
    yield tensor("vision_tower.patch_embed.pos_emb.weight", vision.pos_emb_height, vision.pos_emb_width, width)
    for layer in range(vision.num_hidden_layers):
        block = f"vision_tower.encoder.blocks.{layer}"
        yield from affine(f"{block}.norm0", width)
        yield from affine(f"{block}.wqkv", 3 * width, width)
        yield from affine(f"{block}.wo", width, width)
        yield from affine(f"{block}.norm1", width)
        yield from affine(f"{block}.mlp.fc0", vision.intermediate_size, width)
        yield from affine(f"{block}.mlp.fc1", width, vision.intermediate_size)
    yield from affine("vision_tower.encoder.final_layernorm", width)
    yield from affine("mm_projector.pre_norm", width)
    yield from affine("mm_projector.proj.0", vision.merged_size, vision.merged_size)
    yield from affine("mm_projector.proj.2", config.hidden_size, vision.merged_size)


def all_tensors(config: KimiK2Config) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint: the language model's (names without prefix), then the tower's."""
    yield from expected_tensors(config)
    yield from vision_tensors(config)


def stored_name(config: KimiK2Config, name: str) -> str:
    """A tensor's name in the files, with the prefix if it belongs to the language model."""
    return name if VISION.match(name) else config.tensor_prefix + name
