"""Every field of NxDI's NeuronConfig and MoENeuronConfig: tested with this model, refused, or inherited.

NxDI takes any option and leaves it to the model to follow it; one that the model does not follow gives wrong numbers or
no effect, and no error. `check` is the one place that refuses them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.sharding import layout

_LOG = logging.getLogger(__name__)

# Their effect on the model's outputs is tested in test/nxd (or by what loads and serves it).
# fmt: off
TESTED = frozenset((
    "apply_seq_ids_mask", "async_mode", "batch_size", "blockwise_matmul_config", "buckets",
    "context_encoding_buckets", "ctx_batch_size", "disable_argmax_kernel", "enable_bucketing",
    "enable_eagle_speculation", "enable_fused_speculation", "flash_decoding_enabled", "is_block_kv_layout",
    "is_continuous_batching", "is_eagle3", "is_eagle_draft", "is_prefix_caching",
    "kv_cache_batch_size", "lora_config", "max_batch_size", "max_context_length", "max_length",
    "modules_to_not_convert", "moe_ep_degree", "moe_tp_degree", "n_active_tokens", "n_positions",
    "normalize_top_k_affinities", "on_cpu", "on_device_sampling_config", "output_logits", "pa_block_size",
    "pa_num_blocks", "prefix_buckets", "quantization_block_axis", "quantization_block_size",
    "quantization_dtype", "quantization_type", "quantized", "quantized_checkpoints_path", "router_config",
    "save_sharded_checkpoint", "seq_len", "sequence_parallel_enabled", "speculation_length",
    "tensor_capture_config", "tkg_batch_size", "token_generation_buckets", "torch_dtype", "tp_degree",
    "world_size",
))
# fmt: on

# NxDI's own: they steer its host code, compiler or runtime, or are derived from other fields. Not tested here.
# fmt: off
INHERITED = frozenset((
    "allow_input_truncation", "attn_block_tkg_nki_kernel_disable_gpsimd_sb2sb",
    "attn_block_tkg_nki_kernel_use_online_softmax", "attn_cls", "bucket_n_active_tokens",
    "cc_pipeline_tiling_factor", "disable_kv_cache_tiling", "disable_numeric_cc_token", "dma_order_config",
    "draft_model_modules_to_not_convert", "enable_cte_modular_flow", "enable_long_context_mode",
    "enable_output_completion_notifications", "enable_spill_reload_dge", "enable_token_tree", "fused_qkv",
    "is_hidden_dim_shuffled", "is_intermediate_dim_shuffled", "is_prefill_stage",
    "kv_cache_update_with_kernel", "lm_head_pad", "lm_head_pad_alignment_size", "local_ranks_size",
    "logical_nc_config", "max_new_tokens", "overrides_torch_dtype",
    "quantize_clamp_bound", "rpl_reduce_dtype", "scratchpad_page_size", "seq_len_threshold_for_cc_tiling",
    "skip_sharding", "skip_warmup", "spec_batch_size", "start_rank_id", "target", "tensor_replacement_config",
    "tile_cc", "use_index_calc_kernel", "weight_gather_seq_len_threshold", "weights_to_skip_layout_optimization",
))
# fmt: on

_KERNEL = "the model has no such NKI kernel"
_CACHE = "the compressed cache is one line a sequence, whole on every rank"
_DRAFT = "drafts come from an Eagle3 head inside the graph (is_eagle3), or beside it (speculation_length)"
_ATTENTION = "the latent attention is split by heads only"
_CHUNKED = (
    "NxDI 0.9 refuses it itself (NeuronBaseForCausalLM.__init__, models/model_base.py:3054); with is_prefix_caching a"
    " prompt can be prefilled in parts, each behind the one before"
)
_EXPERT = "Kimi-K2's experts are SwiGLU without limits, scaled by the router's final weights"

# Field: (the values that are taken, why no other is).
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "activation_quantization_type": ((None,), _KERNEL),
    "attention_dp_degree": ((1,), _ATTENTION),
    "attention_dtype": ((None,), "attention runs in torch_dtype, its scores in float32"),
    "attn_block_cte_nki_kernel_enabled": ((False,), _KERNEL),
    "attn_block_tkg_nki_kernel_cache_update": ((False,), _KERNEL),
    "attn_block_tkg_nki_kernel_cascaded_attention": ((False,), _KERNEL),
    "attn_block_tkg_nki_kernel_enabled": ((False,), _KERNEL),
    "attn_kernel_enabled": ((None, False), _KERNEL),
    "attn_tkg_builtin_kernel_enabled": ((False,), _KERNEL),
    "attn_tkg_nki_kernel_enabled": ((False,), _KERNEL),
    "capacity_factor": ((None,), "a capacity factor drops tokens at prefill"),
    "cast_type": (("config",), "the modules declare no dtypes of their own"),
    "chunked_prefill_config": ((None,), _CHUNKED),
    "cp_degree": ((1,), _ATTENTION),
    "eagle_rolling_buffer_kernel_enabled": ((False,), _DRAFT),
    "early_expert_affinity_modulation": ((False,), _EXPERT),
    "enable_eagle_draft_input_norm": ((False,), _DRAFT),
    "enable_ve_data_parallel": ((False,), "the model has no vision encoder"),
    "ep_degree": ((1,), "experts are split by moe_ep_degree"),
    "ep_dispatch_cc_option": (("AR_AG",), "routed and shared experts share one all-reduce"),
    "expert_mlp_nki_kernel_enabled": ((None, False), _KERNEL),
    "fused_rmsnorm_skip_gamma": ((False,), _KERNEL),
    "fused_shared_experts": ((False,), "the shared expert is not one of the routed experts' stack"),
    "gate_clamp_lower_limit": ((None,), _EXPERT),
    "gate_clamp_upper_limit": ((None,), _EXPERT),
    "glu_mlp": ((True,), _EXPERT),
    "glu_type": (("glu",), _EXPERT),
    "hidden_act_bias": ((0, 0.0), _EXPERT),
    "hidden_act_scaling_factor": ((1, 1.0), _EXPERT),
    "hybrid_sharding_config": ((None,), "experts are split alike for prefill and decode"),
    "is_chunked_prefill": ((False,), _CHUNKED),
    "is_full_model_shuffled": ((False,), "there are no MXFP4 weights"),
    "is_medusa": ((False,), _DRAFT),
    "is_mxfp4_compute": ((False,), "there are no MXFP4 weights"),
    "k_cache_transposed": ((False,), _CACHE),
    "kv_cache_padding_size": ((0,), _CACHE),
    "kv_cache_quant": ((False,), _CACHE),
    "kv_cache_tiling": ((False,), _CACHE),
    "kv_quant_config": ((None,), _CACHE),
    "layer_boundary_markers": ((False,), "the layers do not update their caches themselves, which markers ask for"),
    "medusa_speculation_length": ((0,), _DRAFT),
    "medusa_tree": ((None,), _DRAFT),
    "mlp_cp_degree": ((1,), _ATTENTION),
    "mlp_kernel_enabled": ((False,), _KERNEL),
    "mlp_kernel_fuse_residual_add": ((False,), _KERNEL),
    "mlp_tkg_nki_kernel_enabled": ((False,), _KERNEL),
    "moe_fused_nki_kernel_enabled": ((None, False), "its router adds the correction bias to the logits"),
    "moe_mask_padded_tokens": ((False,), "padding is computed and ignored"),
    "num_medusa_heads": ((0,), _DRAFT),
    "out_proj_kernel_enabled": ((False,), _KERNEL),
    "padded_hidden_size": ((None,), "no width is padded"),
    "padded_intermediate_size": ((None,), "no width is padded"),
    "padding_side": (("right",), "positions count from the left"),
    "pp_degree": ((1,), "there is no pipeline"),
    "pre_rope_rmsnorm": ((False,), _ATTENTION),
    "qk_layernorm": ((False,), "norms lie on the latents"),
    "qkv_cte_nki_kernel_fuse_rope": ((False,), _KERNEL),
    "qkv_kernel_enabled": ((False,), _KERNEL),
    "qkv_kernel_fuse_residual_add": ((False,), _KERNEL),
    "qkv_kernel_nbsd_layout": ((False,), _KERNEL),
    "qkv_nki_kernel_enabled": ((False,), _KERNEL),
    "quantization_scale_dtype": (("f32",), "scales are float32"),
    "quantized_mlp_kernel_enabled": ((False,), _KERNEL),
    "return_expert_index": ((False,), "the layers hand on hidden states only"),
    "return_router_logits": ((False,), "the layers hand on hidden states only"),
    "rmsnorm_quantize_kernel_enabled": ((False,), _KERNEL),
    "router_topk_nki_kernel_enabled": ((None, False), "it adds the correction bias to the logits"),
    "shared_experts_sequence_parallel_enabled": ((False,), "the shared expert is split over the ranks"),
    "shared_mlp_nki_kernel_enabled": ((None, False), _KERNEL),
    "strided_context_parallel_kernel_enabled": ((False,), _KERNEL),
    "switch_cc": ((False,), _ATTENTION),
    "token_generation_batches": ((None,), _CACHE),
    "token_tree_config": ((None,), _DRAFT),
    "transpose_shared_experts_weights": ((False,), "the shared expert is stored as the checkpoint has it"),
    "up_clamp_lower_limit": ((None,), _EXPERT),
    "up_clamp_upper_limit": ((None,), _EXPERT),
    "vocab_parallel": ((False,), "the embedding is split over the hidden dimension"),
    "windowed_context_encoding_size": ((None,), _CACHE),
}  # fmt: skip

# With `decode: layers`: field: (the values that are taken, why no other is). Continuous batching, sequence parallelism,
# flash decoding, prefix caching and several tokens a step are tested with it.
LAYERS_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "rpl_reduce_dtype": ((None, torch.float32), "what rides in an all-reduce is summed in float32"),
    "tensor_capture_config": ((None,), "modules inside the kernel cannot be captured; with decode 'xla' they can"),
}
MOST_COLUMNS = 128  # of the residual, on a rank
MOST_SEQUENCES = (
    32  # tokens of a step, whose tiles fit SBUF at the widths of a rank of 64 and 4,096 slots, by the emulator
)
MOST_HEADS = 128  # of all sequences, where a group of ranks shares a cache: a partition each
EXPERTS_IN_COLUMNS, MOST_EXPERTS = 128, 512  # the router's logits lie as columns of so many

# Fields of blockwise_matmul_config. Both make a view of the token map, which loses its reduction over the ranks.
BLOCKWISE_REFUSED = ("use_shard_on_block_dynamic_while", "use_shard_on_intermediate_dynamic_while")
# Buckets that NxDI makes itself are powers of two from here on, and the whole length.
NXDI_SMALLEST_BUCKET = 128
# Names that NxDI reads and does not keep.
DEPRECATED = frozenset({"disable_normalize_top_k_affinities", "logical_neuron_cores"})


def check(options: Mapping[str, Any]) -> None:
    """Refuse options that the model does not follow, and say which of a newer release are inherited.

    Args:
        options: values by NxDI's names: arguments, or the attributes of a neuron config.

    Raises:
        ConfigError: naming the field, what is taken and why.
    """
    for name, value in options.items():
        if name in REFUSED:
            taken, reason = REFUSED[name]
            if value not in taken:
                expected = " or ".join(repr(one) for one in taken)
                raise ConfigError(f"expected {expected}, got {value!r}: {reason}", field=name)
        elif name not in TESTED and name not in INHERITED and name not in DEPRECATED:
            defaults = _defaults()
            if name not in defaults:
                raise ConfigError("NxDI has no such option", field=name)
            if value != defaults[name]:
                expected = f"{defaults[name]!r}, the release's default"
                raise ConfigError(f"expected {expected}, got {value!r}: not tried with this model", field=name)
            _LOG.info("%s: %r, NxDI's default; not known here", name, value)


@cache
def _defaults() -> dict[str, Any]:
    from neuronx_distributed_inference.models.config import MoENeuronConfig

    return dict(vars(MoENeuronConfig()))


def check_together(config: Any) -> None:
    """Refuse combinations; `config` is the whole neuron config.

    Raises:
        ConfigError: naming the field.
    """
    for name in BLOCKWISE_REFUSED:
        if getattr(config.blockwise_matmul_config, name, False):
            raise ConfigError("expected False: the token map would be cut", field=f"blockwise_matmul_config.{name}")
    if config.output_logits and config.on_device_sampling_config is None:
        raise ConfigError("expected False: without on-device sampling logits are the output", field="output_logits")
    if config.world_size != config.tp_degree:
        raise ConfigError(f"expected tp_degree ({config.tp_degree}), got {config.world_size}", field="world_size")
    if config.async_mode and config.on_device_sampling_config is None:
        raise ConfigError("asynchronous steps need on-device sampling", field="on_device_sampling_config")
    if config.sequence_parallel_enabled:
        _check_sequence_parallel(config)
    _check_blocks(config)
    lines = config.is_continuous_batching and config.tkg_batch_size > 1 and not config.is_block_kv_layout
    if lines and not config.apply_seq_ids_mask:
        raise ConfigError(
            "expected True: a step with fewer sequences than lines would overwrite the others' caches",
            field="apply_seq_ids_mask",
        )
    _check_several_tokens(config)
    _check_drafts(config)


def _check_sequence_parallel(config: Any) -> None:
    if config.tensor_capture_config is not None:
        raise ConfigError("expected None: each rank has its part of the sequence", field="tensor_capture_config")
    _check_lengths(config, ("max_context_length", "context_encoding_buckets"), config.tp_degree)


def cores_per_group(config: Any, asked: int | None) -> int:
    """Ranks that share one latent cache; 1 without flash decoding. `config` is the whole neuron config.

    Raises:
        ConfigError: the ranks do not divide into such groups, or a bucket's positions among a group's ranks.
    """
    if not config.flash_decoding_enabled:
        if asked not in (None, 1):
            raise ConfigError(f"expected 1 without flash_decoding_enabled, got {asked}", field="num_cores_per_group")
        return 1
    ranks: int = config.tp_degree
    cores = ranks if asked is None else asked
    if cores < 2 or ranks % cores:
        expected = f"a divisor of tp_degree ({ranks}) above 1"
        raise ConfigError(f"expected {expected}, got {cores}", field="num_cores_per_group")
    names = ["seq_len", "max_context_length", "context_encoding_buckets", "token_generation_buckets"]
    _check_lengths(config, [*names, "pa_block_size"] if config.is_prefix_caching else names, cores)
    return cores


def _check_lengths(config: Any, names: Iterable[str], ranks: int) -> None:
    """Refuse lengths and buckets that do not divide among `ranks`."""
    made_by_nxdi: int | list[int] = NXDI_SMALLEST_BUCKET if config.enable_bucketing else []
    for name in names:
        stated = getattr(config, name) or made_by_nxdi
        for length in [stated] if isinstance(stated, int) else stated:
            if length % ranks:
                raise ConfigError(f"{length} positions do not divide among {ranks} ranks", field=name)


def _check_blocks(config: Any) -> None:
    """What NxDI leaves to an assertion, an index out of bounds, or wrong numbers."""
    if config.is_prefix_caching != config.is_block_kv_layout:
        missing = "is_block_kv_layout" if config.is_prefix_caching else "is_prefix_caching"
        raise ConfigError("expected True: blocks and cached prefixes come together", field=missing)
    if not config.is_prefix_caching:
        return
    if config.speculation_length:
        raise ConfigError(
            "expected 0: with is_prefix_caching NxDI takes each step to its token generation model, which"
            " speculation_length replaces (models/model_base.py, _get_model_outputs)",
            field="speculation_length",
        )
    for name in ("async_mode", "sequence_parallel_enabled"):
        if getattr(config, name):
            raise ConfigError("expected False: not followed together with is_prefix_caching", field=name)
    block = config.pa_block_size
    for name in ("max_context_length", "seq_len", "prefix_buckets", "token_generation_buckets"):
        lengths = getattr(config, name) or []
        for size in lengths if isinstance(lengths, list) else [lengths]:
            if size % block:
                raise ConfigError(f"expected a multiple of pa_block_size ({block}), got {size}", field=name)
    if config.pa_num_blocks * block < config.seq_len:
        raise ConfigError(
            f"{config.pa_num_blocks} blocks of {block} hold no sequence of {config.seq_len} tokens",
            field="pa_num_blocks",
        )


def _check_several_tokens(config: Any) -> None:
    """NxDI takes a graph for a step of several tokens, or for a prompt, by its number of tokens."""
    length = config.speculation_length
    if length == 1:
        raise ConfigError("expected 0, or at least 2 tokens a step, got 1", field="speculation_length")
    prompts = [config.max_context_length, *(config.context_encoding_buckets or [])]
    if length and length in prompts:
        raise ConfigError(
            f"{length} is a bucket of context_encoding_buckets: its prompts would be taken for drafts",
            field="speculation_length",
        )


# With a draft in the graph: field: (the values that are taken, why no other is).
FUSED_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "async_mode": ((False,), "not tried with a draft in the graph"),
    "enable_eagle_speculation": ((True,), "the draft in the graph is an Eagle3 head"),
    "flash_decoding_enabled": ((False,), "the draft's cache is not split by positions"),
    "is_eagle3": ((True,), "the draft in the graph is an Eagle3 head"),
    "is_prefix_caching": ((False,), "NxDI has no EAGLE3 with it (models/model_base.py, NeuronFusedSpecModel)"),
    "lora_config": ((None,), "NxDI takes the last outputs for hidden states (NeuronFusedSpecModel)"),
    "output_logits": ((False,), "logits would be those of drafts too"),
    "sequence_parallel_enabled": ((False,), "a draft reads hidden states of the whole prompt"),
    "tensor_capture_config": ((None,), "NxDI takes outputs behind the tokens for caches (NeuronFusedSpecModel)"),
}


def _check_drafts(config: Any) -> None:
    if config.is_eagle_draft:  # made from a target's, see draft_config.py
        return
    if not config.enable_fused_speculation:
        if config.is_eagle3:
            raise ConfigError("expected True with is_eagle3", field="enable_fused_speculation")
        return
    for name, (taken, reason) in FUSED_REFUSED.items():
        if (value := getattr(config, name)) not in taken:
            expected = f"{taken[0]!r} with enable_fused_speculation"
            raise ConfigError(f"expected {expected}, got {value!r}: {reason}", field=name)
    if config.speculation_length < 2:
        raise ConfigError(f"expected at least 2, got {config.speculation_length}", field="speculation_length")
    if config.on_device_sampling_config is None:
        raise ConfigError("drafts are verified on the device", field="on_device_sampling_config")


def check_decode(config: Any) -> None:
    """Refuse what the kernel of whole layers, and experts in tiles, do not follow; `config` is the neuron config.

    Raises:
        ConfigError: naming the field.
    """
    layout.check_decode(config.decode)
    layers = config.layers
    if config.decode_layers_per_kernel is not None and (not layers or config.decode_layers_per_kernel < 1):
        expected = "a positive number" if layers else "None without decode 'layers'"
        raise ConfigError(
            f"expected {expected}, got {config.decode_layers_per_kernel}", field="decode_layers_per_kernel"
        )
    if not layers:
        return
    for name, (taken, reason) in LAYERS_REFUSED.items():
        if (value := getattr(config, name)) not in taken:
            expected = " or ".join(repr(one) for one in taken)
            raise ConfigError(f"expected {expected} with decode 'layers', got {value!r}: {reason}", field=name)
    tokens = config.tkg_batch_size * max(config.speculation_length, 1)
    if tokens > MOST_SEQUENCES:
        expected = f"at most {MOST_SEQUENCES} tokens a step with decode 'layers'"
        raise ConfigError(f"expected {expected}, got {tokens}", field="batch_size")
    if config.quantized and config.quantization_type != "blockwise_symmetric":
        expected = "blockwise_symmetric with decode 'layers'"
        raise ConfigError(f"expected {expected}, got {config.quantization_type!r}", field="quantization_type")
    if not config.blockwise_matmul_config.use_torch_block_wise:
        raise ConfigError(
            "expected True with decode 'layers': NxD's NKI kernels read experts in another arrangement",
            field="blockwise_matmul_config.use_torch_block_wise",
        )


def check_slots(config: Any) -> None:
    """Refuse cache lengths that the kernel of whole layers does not take, where each rank has the whole cache.

    Raises:
        ConfigError: naming the field.
    """
    _check_slots(config, 128 * config.logical_nc_config, "decode 'layers' takes a multiple of {tile}")


def _check_slots(config: Any, tile: int, taken: str) -> None:
    """Refuse cache lengths that kernels do not take."""
    made_by_nxdi: int | list[int] = NXDI_SMALLEST_BUCKET if config.enable_bucketing else []
    for name in ("seq_len", "token_generation_buckets"):
        stated = getattr(config, name) or made_by_nxdi
        for length in [stated] if isinstance(stated, int) else stated:
            if length % tile:
                raise ConfigError(f"{taken.format(tile=tile)}, got {length}", field=name)


def check_shared_cache(config: Any, group: int) -> None:
    """Refuse what the kernel of all MoE layers does not take where `group` ranks share a cache.

    Raises:
        ConfigError: naming the field.
    """
    if config.logical_nc_config != 2 or group % 2:
        field = "num_cores_per_group" if group % 2 else "logical_nc_config"
        raise ConfigError("decode 'layers' divides a group's heads between two cores", field=field)
    tokens = config.tkg_batch_size * max(config.speculation_length, 1)
    if tokens * group > MOST_HEADS:
        expected = f"at most {MOST_HEADS // group} tokens a step over groups of {group}"
        raise ConfigError(f"decode 'layers' takes {expected}, got {tokens}", field="batch_size")
    tile = 128 * config.logical_nc_config * group
    _check_slots(config, tile, f"decode 'layers' takes a multiple of {{tile}}, {tile // group} a rank")


def check_layer_sizes(hf: KimiK2Config, ranks: int, group: int = 0) -> None:
    """Refuse models that the kernel does not take; `group` of the ranks share a cache.

    Raises:
        ConfigError: naming the field.
    """
    dense = [layer for layer in range(hf.num_hidden_layers) if not hf.is_moe_layer(layer)]
    if not dense or dense != list(range(len(dense))):
        raise ConfigError(
            f"decode 'layers' takes MoE layers behind dense ones, got dense layers {dense}",
            field="first_k_dense_replace",
        )
    count, own = hf.n_routed_experts, hf.hidden_size // ranks
    if count % EXPERTS_IN_COLUMNS or count > MOST_EXPERTS:
        expected = f"a multiple of {EXPERTS_IN_COLUMNS} up to {MOST_EXPERTS}"
        raise ConfigError(f"decode 'layers' takes {expected}, got {count}", field="n_routed_experts")
    if own > MOST_COLUMNS:
        raise ConfigError(
            f"decode 'layers' takes at most {MOST_COLUMNS} columns of the residual a rank, got {own}",
            field="hidden_size",
        )
    if group and hf.num_attention_heads != ranks:
        expected = f"one head a rank ({ranks}) with flash decoding"
        raise ConfigError(
            f"decode 'layers' takes {expected}, got {hf.num_attention_heads}", field="num_attention_heads"
        )
    if not hf.norm_topk_prob:
        raise ConfigError("decode 'layers' normalises the weights, got False", field="norm_topk_prob")
