"""What this class follows of NxDI beyond the hand-written one, and the combinations that it refuses.

Options are followed or refused by the hand-written configuration (`contrib_model.configuration_kimi_k2`). Every check
here raises its ConfigError, which `typed` makes kimi_k2's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from kimi_k2.contrib_model import quantization as contrib
from kimi_k2.contrib_model.quantization import require
from kimi_k2.errors import ConfigError
from kimi_k2.neuron.layer_arguments import MOST_TOKENS
from kimi_k2.sharding import layout

# NxDI's options, with tests in test/nxd, and this class's own.
FOLLOWED = frozenset((
    "disable_kv_cache_tiling", "enable_eagle_speculation", "enable_fused_speculation", "flash_decoding_enabled",
    "is_block_kv_layout", "is_eagle3", "is_eagle_draft", "is_prefix_caching", "lora_config", "pa_block_size",
    "pa_num_blocks", "prefix_buckets", "speculation_length", "tensor_capture_config",
    "decode", "decode_layers_per_kernel", "num_cores_per_group",
))  # fmt: skip

# Beside an option: field: (the values that are taken, why no other is).
Beside = Mapping[str, tuple[tuple[Any, ...], str]]
# Continuous batching, sequence parallelism, flash decoding, prefix caching and several tokens a step are tested with
# `decode: layers`.
LAYERS: Beside = {
    "rpl_reduce_dtype": ((None, torch.float32), "what rides in an all-reduce is summed in float32"),
    "tensor_capture_config": ((None,), "modules inside the kernel cannot be captured; with decode 'xla' they can"),
}
SEQUENCE: Beside = {"tensor_capture_config": ((None,), "each rank has its part of the sequence")}
PREFIXES: Beside = {
    "speculation_length": (
        (0,), "NxDI takes each step to its token generation model, which speculation_length replaces"
        " (models/model_base.py, _get_model_outputs)",
    ),
    **dict.fromkeys(("async_mode", "sequence_parallel_enabled"), ((False,), "not followed together")),
}  # fmt: skip
# With a draft in the graph.
FUSED: Beside = {
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
TILES = "of slots that decode 'layers' takes at once"
MOST_HEADS = 128  # of all sequences, where a group of ranks shares a cache: a partition each


@contextmanager
def typed() -> Iterator[None]:
    """The hand-written configuration's errors as kimi_k2's."""
    try:
        yield
    except contrib.ConfigError as error:
        raise ConfigError(str(error).removeprefix(f"{error.field}: "), field=error.field) from None


def check_beside(config: Any, option: str, others: Beside) -> None:
    """Refuse other options' values that are not followed together with an option."""
    for name, (taken, reason) in others.items():
        value, expected = getattr(config, name), " or ".join(repr(choice) for choice in taken)
        require(value in taken, name, f"expected {expected} with {option}, got {value!r}: {reason}")


def check_together(config: Any) -> None:
    """Refuse combinations; `config` is the whole neuron config."""
    if config.sequence_parallel_enabled:
        check_beside(config, "sequence_parallel_enabled", SEQUENCE)
    _check_blocks(config)
    _check_several_tokens(config)
    _check_drafts(config)
    _check_decode(config)


def cores_per_group(config: Any, asked: int | None) -> int:
    """Ranks that share one latent cache, which divide a bucket's positions; 1 without flash decoding."""
    if not config.flash_decoding_enabled:
        require(asked in (None, 1), "num_cores_per_group", f"expected 1 without flash_decoding_enabled, got {asked}")
        return 1
    ranks: int = config.tp_degree
    cores = ranks if asked is None else asked
    divides = cores > 1 and ranks % cores == 0
    require(divides, "num_cores_per_group", f"expected a divisor of tp_degree ({ranks}) above 1, got {cores}")
    names = ["seq_len", "max_context_length", "context_encoding_buckets", "token_generation_buckets"]
    config.check_lengths([*names, "pa_block_size"] if config.is_prefix_caching else names, cores)
    return cores


def _check_blocks(config: Any) -> None:
    """What NxDI leaves to an assertion, an index out of bounds, or wrong numbers."""
    for name, other in (("is_block_kv_layout", "is_prefix_caching"), ("is_prefix_caching", "is_block_kv_layout")):
        given = getattr(config, name) or not getattr(config, other)
        require(given, name, "expected True: blocks and cached prefixes come together")
    if not config.is_prefix_caching:
        return
    check_beside(config, "is_prefix_caching", PREFIXES)
    block, blocks = config.pa_block_size, config.pa_num_blocks
    names = ("max_context_length", "seq_len", "prefix_buckets", "token_generation_buckets")
    config.check_lengths(names, block, "of pa_block_size")
    holds = blocks * block >= config.seq_len
    require(holds, "pa_num_blocks", f"{blocks} blocks of {block} hold no sequence of {config.seq_len} tokens")


def _check_several_tokens(config: Any) -> None:
    """NxDI takes a graph for a step of several tokens, or for a prompt, by its number of tokens."""
    length, name = config.speculation_length, "speculation_length"
    require(length != 1, name, "expected 0, or at least 2 tokens a step, got 1")
    prompts = [config.max_context_length, *(config.context_encoding_buckets or [])]
    taken = length and length in prompts
    require(not taken, name, f"{length} is a bucket of context_encoding_buckets: its prompts would be taken for drafts")


def _check_drafts(config: Any) -> None:
    if config.is_eagle_draft:  # made from a target's, see draft_config.py
        return
    if not config.enable_fused_speculation:
        require(not config.is_eagle3, "enable_fused_speculation", "expected True with is_eagle3")
        return
    check_beside(config, "enable_fused_speculation", FUSED)
    length, sampling = config.speculation_length, config.on_device_sampling_config
    require(length >= 2, "speculation_length", f"expected at least 2, got {length}")
    require(sampling is not None, "on_device_sampling_config", "drafts are verified on the device")


def _check_decode(config: Any) -> None:
    """Refuse what the kernel of whole layers, and experts in tiles, do not follow."""
    layout.check_decode(config.decode)
    each = config.decode_layers_per_kernel
    expected = "a positive number" if config.layers else "None without decode 'layers'"
    taken = each is None or (config.layers and each > 0)
    require(taken, "decode_layers_per_kernel", f"expected {expected}, got {each}")
    if not config.layers:
        return
    check_beside(config, "decode 'layers'", LAYERS)
    tokens, kind = tokens_of(config), config.quantization_type
    expected = f"expected at most {MOST_TOKENS} tokens a step with decode 'layers', got {tokens}"
    require(tokens <= MOST_TOKENS, "batch_size", expected)
    held = not config.quantized or kind == contrib.BLOCKWISE
    require(held, "quantization_type", f"expected {contrib.BLOCKWISE} with decode 'layers', got {kind!r}")


def tokens_of(config: Any) -> int:
    """Tokens of a step."""
    tokens: int = config.tkg_batch_size * max(config.speculation_length, 1)
    return tokens


def check_slots(config: Any, group: int) -> None:
    """Refuse what the kernel of all MoE layers does not take of caches that `group` ranks share, 1 for none."""
    cores, tokens = config.logical_nc_config, tokens_of(config)
    if group > 1:
        field = "num_cores_per_group" if group % 2 else "logical_nc_config"
        halves = cores == 2 and group % 2 == 0
        require(halves, field, "decode 'layers' divides a group's heads between two cores")
        expected = f"decode 'layers' takes at most {MOST_HEADS // group} tokens a step over groups of {group}"
        require(tokens * group <= MOST_HEADS, "batch_size", f"{expected}, got {tokens}")
    config.check_lengths(("seq_len", "token_generation_buckets"), 128 * cores * group, TILES)
