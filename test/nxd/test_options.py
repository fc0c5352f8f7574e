"""What the model does not follow of NxDI's options is refused by name."""

from __future__ import annotations

from typing import Any

import environment
import pytest
from cases import BLOCKS, FLASH, SEQUENCE
from harness import neuron_config

from kimi_k2.errors import ConfigError

SPLIT: dict[str, Any] = {"tp_degree": 4, "enable_bucketing": True, "seq_len": 256, "max_context_length": 256}
SHORT: dict[str, Any] = {"seq_len": 48, "max_context_length": 48}
SAMPLING: dict[str, Any] = {"on_device_sampling_config": {"top_k": 1}}
PREFIXES, PREFIXES_SPLIT = (neuron_config(ranks, 1, 4, **BLOCKS) for ranks in (1, 2))
DRAFT: dict[str, Any] = {
    **dict.fromkeys(("enable_fused_speculation", "enable_eagle_speculation", "is_eagle3"), True),
    "speculation_length": 4, "on_device_sampling_config": {},
}  # fmt: skip


def test_every_option_that_is_not_followed_is_refused() -> None:
    """All of NxDI's; what others do is in test_folder_options.py, and of this class in the other files."""
    from neuronx_distributed_inference.models.config import MoENeuronConfig

    config = environment.contrib("config").KimiK2NeuronConfig
    fields = vars(MoENeuronConfig())
    assert len(fields) > 150
    for name in fields.keys() - config.FOLLOWED:
        with pytest.raises(ConfigError, match=name):
            config(tp_degree=1, **{name: "other"})


@pytest.mark.parametrize(("given", "field"), [
    ({"no_such_option": 1}, "no_such_option"),
    ({"output_logits": True}, "output_logits"),
    ({"tp_degree": 2, "world_size": 4}, "world_size"),
    ({"async_mode": True}, "async_mode"),
    ({"is_continuous_batching": True, "batch_size": 2, "apply_seq_ids_mask": False}, "apply_seq_ids_mask"),
    ({"is_eagle3": True}, "enable_fused_speculation"),
    ({**DRAFT, "is_eagle3": False}, "is_eagle3"),
    ({**DRAFT, "enable_eagle_speculation": False}, "enable_eagle_speculation"),
    ({**DRAFT, "speculation_length": 0}, "speculation_length"),
    ({**DRAFT, "on_device_sampling_config": None}, "on_device_sampling_config"),
    ({**DRAFT, "sequence_parallel_enabled": True}, "sequence_parallel_enabled"),
    ({**DRAFT, "output_logits": True}, "output_logits"),
    ({**DRAFT, "async_mode": True}, "async_mode"),
    ({"blockwise_matmul_config": {"use_shard_on_block_dynamic_while": True}}, "use_shard_on_block_dynamic_while"),
    ({"capacity_factor": 1.0}, "capacity_factor"),
    # NxDI tells a prompt and drafts apart by the number of tokens alone.
    ({**SHORT, "speculation_length": 1}, "speculation_length"),
    (
        {**SHORT, "speculation_length": 16, "context_encoding_buckets": [16, 48], "enable_bucketing": True},
        "speculation_length",
    ),
    # The cache in blocks.
    ({**PREFIXES, "is_block_kv_layout": False}, "is_block_kv_layout"),
    ({**PREFIXES, "is_prefix_caching": False}, "is_prefix_caching"),
    ({**PREFIXES, "pa_num_blocks": 5}, "pa_num_blocks"),
    ({**PREFIXES, "pa_block_size": 7}, "max_context_length"),
    ({**PREFIXES, "prefix_buckets": [12]}, "prefix_buckets"),
    ({**PREFIXES, "token_generation_buckets": [20, 48]}, "token_generation_buckets"),
    ({**PREFIXES, "speculation_length": 3}, "speculation_length"),
    ({**PREFIXES, **SEQUENCE}, "sequence_parallel_enabled"),
    ({**PREFIXES, **SAMPLING, "async_mode": True}, "async_mode"),
    ({**PREFIXES, "chunked_prefill_config": {"max_num_seqs": 2}}, "chunked_prefill_config"),
    (
        {**PREFIXES_SPLIT, **FLASH, "pa_block_size": 3, "prefix_buckets": [18], "context_encoding_buckets": [24]},
        "pa_block_size",
    ),
    # What does not divide among ranks.
    ({**SPLIT, "num_cores_per_group": 2}, "num_cores_per_group"),
    ({**SPLIT, **FLASH, "num_cores_per_group": 3}, "num_cores_per_group"),
    ({**SPLIT, **FLASH, "num_cores_per_group": 1}, "num_cores_per_group"),
    ({**SPLIT, **FLASH, "seq_len": 258}, "seq_len"),
    ({**SPLIT, **FLASH, "token_generation_buckets": [130, 256]}, "token_generation_buckets"),
    ({**SPLIT, **FLASH, "context_encoding_buckets": [66, 256]}, "context_encoding_buckets"),
    ({**SPLIT, **SEQUENCE, "max_context_length": 254}, "max_context_length"),
    ({**SPLIT, **SEQUENCE, "context_encoding_buckets": [66, 256]}, "context_encoding_buckets"),
    (
        {**SPLIT, **SEQUENCE, **SAMPLING, "tensor_capture_config": {"modules_to_capture": ["norm"]}},
        "tensor_capture_config",
    ),
])  # fmt: skip
def test_combinations_that_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        environment.contrib("config").KimiK2NeuronConfig(**given)


def test_what_combinations_begin_with_is_taken() -> None:
    for given in (SHORT, PREFIXES, {**SPLIT, **FLASH, **SEQUENCE}):
        environment.contrib("config").KimiK2NeuronConfig(**given)
