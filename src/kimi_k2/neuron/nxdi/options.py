"""What this class follows of NxDI beyond the hand-written one, and the combinations that it refuses.

Options are followed or refused by the hand-written configuration (`contrib_model.configuration_kimi_k2`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.contrib_model import quantization as contrib
from kimi_k2.errors import ConfigError
from kimi_k2.sharding import layout

# NxDI's options, with tests in test/nxd, and this class's own.
FOLLOWED = frozenset((
    "disable_kv_cache_tiling", "enable_eagle_speculation", "enable_fused_speculation", "flash_decoding_enabled",
    "is_block_kv_layout", "is_eagle3", "is_eagle_draft", "is_prefix_caching", "lora_config", "pa_block_size",
    "pa_num_blocks", "prefix_buckets", "speculation_length", "tensor_capture_config",
    "decode", "decode_layers_per_kernel", "num_cores_per_group",
))  # fmt: skip

# With `decode: layers`: field: (the values that are taken, why no other is). Continuous batching, sequence parallelism,
# flash decoding, prefix caching and several tokens a step are tested with it.
LAYERS_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "rpl_reduce_dtype": ((None, torch.float32), "what rides in an all-reduce is summed in float32"),
    "tensor_capture_config": ((None,), "modules inside the kernel cannot be captured; with decode 'xla' they can"),
}
TILES = "of slots that decode 'layers' takes at once"
MOST_COLUMNS = 128  # of the residual, on a rank
MOST_SEQUENCES = (
    32  # tokens of a step, whose tiles fit SBUF at the widths of a rank of 64 and 4,096 slots, by the emulator
)
MOST_HEADS = 128  # of all sequences, where a group of ranks shares a cache: a partition each
EXPERTS_IN_COLUMNS, MOST_EXPERTS = 128, 512  # the router's logits lie as columns of so many


@contextmanager
def typed() -> Iterator[None]:
    """The hand-written configuration's errors as kimi_k2's."""
    try:
        yield
    except contrib.ConfigError as error:
        raise ConfigError(str(error).removeprefix(f"{error.field}: "), field=error.field) from None


def check_together(config: Any) -> None:
    """Refuse combinations; `config` is the whole neuron config.

    Raises:
        ConfigError: naming the field.
    """
    if config.sequence_parallel_enabled and config.tensor_capture_config is not None:
        raise ConfigError("expected None: each rank has its part of the sequence", field="tensor_capture_config")
    _check_blocks(config)
    _check_several_tokens(config)
    _check_drafts(config)


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
    config.check_lengths([*names, "pa_block_size"] if config.is_prefix_caching else names, cores)
    return cores


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


def check_slots(config: Any) -> None:
    """Refuse cache lengths that the kernel of whole layers does not take, where each rank has the whole cache.

    Raises:
        ConfigError: naming the field.
    """
    config.check_lengths(("seq_len", "token_generation_buckets"), 128 * config.logical_nc_config, TILES)


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
    config.check_lengths(("seq_len", "token_generation_buckets"), 128 * config.logical_nc_config * group, TILES)


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
