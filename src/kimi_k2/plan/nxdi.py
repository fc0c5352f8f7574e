"""What the NxDI class takes of options together, and of a model with them: it asks, and so do planners, without NxD.

`config` has NxDI's options under their names: the class's whole neuron config, or a deployment's fields. Every check
here raises the hand-written configuration's ConfigError, which `typed` makes kimi_k2's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kimi_k2.checkpoint.adapter import adapter_scale
from kimi_k2.config import KimiK2Config
from kimi_k2.contrib_model import quantization as contrib
from kimi_k2.contrib_model.checks import check_batches, check_buckets, check_lengths
from kimi_k2.contrib_model.quantization import require
from kimi_k2.drafts.config import DraftConfig
from kimi_k2.errors import ConfigError
from kimi_k2.sharding import layout
from kimi_k2.sharding.attention_tiles import check_sizes
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.whole_layers import MOST_HEADS, MOST_TOKENS, check_model, slots_at_once

# Options that a deployment has no field for, at NxDI's defaults, or the class's beside continuous batching.
UNSAID: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "enable_fused_speculation", "is_block_kv_layout", "is_eagle3", "is_eagle_draft", "is_prefix_caching",
            "output_logits", "quantized", "quantization_type", "sequence_parallel_enabled",
        ),
        False,
    ),
    "apply_seq_ids_mask": True,
}  # fmt: skip
AUX_LAYERS = 3  # whose hidden states NxDI keeps from a step to the next (NeuronFusedSpecModel, rolling buffer)
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
ADAPTERS: Beside = {
    **dict.fromkeys(("is_continuous_batching", "speculation_length"), ((False, None), "not tested together")),
    **dict.fromkeys(
        (
            "async_mode", "flash_decoding_enabled", "is_prefix_caching", "save_sharded_checkpoint",
            "sequence_parallel_enabled",
        ),
        ((False,), "not followed together"),
    ),
}  # fmt: skip


@contextmanager
def typed() -> Iterator[None]:
    """The hand-written configuration's errors as kimi_k2's."""
    try:
        yield
    except contrib.ConfigError as error:
        raise ConfigError(str(error).removeprefix(f"{error.field}: "), field=error.field) from None


def check_beside(config: Any, option: str, others: Beside) -> None:
    """Refuse other options' values, where there are any, that are not followed together with an option."""
    for name, (taken, reason) in others.items():
        value, expected = getattr(config, name, taken[0]), " or ".join(repr(choice) for choice in taken)
        require(value in taken, name, f"expected {expected} with {option}, got {value!r}: {reason}")


def draft_options(tokens: int) -> dict[str, Any]:
    """Options of a step that drafts so many tokens and verifies them; its length counts the last token too."""
    flags = ("enable_fused_speculation", "enable_eagle_speculation", "is_eagle3")
    return {**dict.fromkeys(flags, True), "speculation_length": tokens + 1}


def check_together(config: Any) -> int:
    """Refuse combinations.

    Returns:
        Ranks that share one latent cache; 1 without flash decoding.
    """
    cores = config.logical_nc_config
    require(cores in (1, 2), "logical_nc_config", f"expected 1 or 2, got {cores}")
    check_batches(config)
    check_buckets(config)
    if config.sequence_parallel_enabled:
        check_beside(config, "sequence_parallel_enabled", SEQUENCE)
    _check_blocks(config)
    _check_several_tokens(config)
    _check_drafts(config)
    if config.lora_config is not None:
        for path in filter(os.path.isdir, (config.lora_config.lora_ckpt_paths or {}).values()):
            adapter_scale(path)
        check_beside(config, "lora_config", ADAPTERS)
    layers = _check_decode(config)
    group = _check_group(config)
    if layers:
        _check_slots(config, group)
    return group


def check_kept(config: KimiK2Config, held: Layout, cores: int, *, native: bool = False) -> None:
    """Refuse a model that cannot be held so.

    Args:
        config: of the model.
        held: its ranks and formats.
        cores: of a rank (logical_nc_config).
        native: whether vllm-neuron's torch-native line runs it.

    Raises:
        ConfigError: kimi_k2's.
    """
    for field in () if native else ("n_group", "moe_layer_freq"):
        if (value := getattr(config, field)) != 1:
            raise ConfigError(f"expected 1, got {value}", field=field)
    if held.layers:
        check_sizes(config)
        check_model(config, held.ranks, cores, held.query_group, halves=native)
        if held.expert_format(config).shared is None:
            expected = "the shared expert in tiles, of 32 or 64 columns a rank"
            raise ConfigError(f"decode 'layers' needs {expected}", field="experts")


def check_head(head: DraftConfig, target: KimiK2Config, ranks: int, file: Path | None = None) -> tuple[int, ...]:
    """Refuse an Eagle3 head that cannot draft in the target's graph.

    Returns:
        The layers of the target that it reads, as DraftConfig numbers them.

    Raises:
        ConfigError: kimi_k2's: it does not divide among the ranks, or reads other than three layers.
    """
    layers = head.layers(target)
    if len(set(layers)) != AUX_LAYERS:
        raise ConfigError(
            f"expected {AUX_LAYERS} layers, as many as NxDI's rolling buffer holds (models/model_base.py,"
            f" NeuronFusedSpecModel), got {list(layers)}",
            field="eagle_aux_hidden_state_layer_ids",
            file=file,
        )
    names = ("num_attention_heads", "draft_vocab_size", "intermediate_size")
    for name in ("num_key_value_heads", *names) if head.form == "llama" else names:
        if (size := getattr(head, name)) % ranks:
            raise ConfigError(f"{size} does not divide among {ranks} ranks", field=name, file=file)
    return layers


def _check_group(config: Any) -> int:
    """Ranks that share one latent cache, which divide a bucket's positions; 1 without flash decoding."""
    asked, ranks = config.num_cores_per_group, config.tp_degree
    if not config.flash_decoding_enabled:
        require(asked in (None, 1), "num_cores_per_group", f"expected 1 without flash_decoding_enabled, got {asked}")
        return 1
    cores: int = ranks if asked is None else asked
    divides = cores > 1 and ranks % cores == 0
    require(divides, "num_cores_per_group", f"expected a divisor of tp_degree ({ranks}) above 1, got {cores}")
    names = ["seq_len", "max_context_length", "context_encoding_buckets", "token_generation_buckets"]
    check_lengths(config, [*names, "pa_block_size"] if config.is_prefix_caching else names, cores)
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
    check_lengths(config, names, block, "of pa_block_size")
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


def _check_decode(config: Any) -> bool:
    """Refuse what the kernel of whole layers, and experts in tiles, do not follow; whether there is that kernel."""
    layout.check_decode(config.decode)
    layers, each = config.decode == "layers", config.decode_layers_per_kernel
    expected = "a positive number" if layers else "None without decode 'layers'"
    require(each is None or (layers and each > 0), "decode_layers_per_kernel", f"expected {expected}, got {each}")
    if not layers:
        return False
    check_beside(config, "decode 'layers'", LAYERS)
    tokens, kind = _tokens(config), config.quantization_type
    expected = f"expected at most {MOST_TOKENS} tokens a step with decode 'layers', got {tokens}"
    require(tokens <= MOST_TOKENS, "batch_size", expected)
    held = not config.quantized or kind == contrib.BLOCKWISE
    require(held, "quantization_type", f"expected {contrib.BLOCKWISE} with decode 'layers', got {kind!r}")
    return True


def _tokens(config: Any) -> int:
    """Tokens of a step."""
    return int(config.batch_size * max(config.speculation_length or 1, 1))


def _check_slots(config: Any, group: int) -> None:
    """Refuse what the kernel of all MoE layers does not take of caches that `group` ranks share, 1 for none."""
    cores, tokens = config.logical_nc_config, _tokens(config)
    if group > 1:
        field = "num_cores_per_group" if group % 2 else "logical_nc_config"
        halves = cores == 2 and group % 2 == 0
        require(halves, field, "decode 'layers' divides a group's heads between two cores")
        expected = f"decode 'layers' takes at most {MOST_HEADS // group} tokens a step over groups of {group}"
        require(tokens * group <= MOST_HEADS, "batch_size", f"{expected}, got {tokens}")
    # Where no buckets are stated the class makes some that divide.
    names = ["seq_len", "token_generation_buckets"] if config.token_generation_buckets else ["seq_len"]
    check_lengths(config, names, slots_at_once(cores, group), "of slots that decode 'layers' takes at once")
