"""Layouts for flash decoding and sequence parallelism: options of KimiK2NeuronConfig by name."""

from __future__ import annotations

from typing import Any

from harness import neuron_config

BUCKETS = {"enable_bucketing": True, "context_encoding_buckets": [16, 48], "token_generation_buckets": [32, 48]}
LINES: dict[str, Any] = {"is_continuous_batching": True, "ctx_batch_size": 1, "tkg_batch_size": 4, "max_batch_size": 4}
FLASH, SEQUENCE = {"flash_decoding_enabled": True}, {"sequence_parallel_enabled": True}
# Tensor and expert parallelism, and options.
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "flash TP2": (2, 1, FLASH),
    "flash TP4": (4, 1, FLASH | BUCKETS),
    "flash TP4 in groups of 2": (4, 1, FLASH | {"num_cores_per_group": 2} | LINES),
    "flash TP2xEP2": (2, 2, FLASH | LINES | BUCKETS),
    "sequence TP2": (2, 1, SEQUENCE),
    "sequence TP4": (4, 1, SEQUENCE | LINES | BUCKETS),
    "sequence EP2": (1, 2, SEQUENCE),
    "sequence TP2xEP2": (2, 2, SEQUENCE | BUCKETS),
    "both TP2xEP2": (2, 2, FLASH | SEQUENCE | LINES),
}
ARRIVAL = [2, 0, 3, 1]  # order of the prompts where each is prefilled into its own line


def arguments(name: str, batch: int = 4, **options: Any) -> dict[str, Any]:
    """Arguments of KimiK2NeuronConfig; the ranks share the work of assigning tokens to blocks, as in the presets."""
    tp, ep, own = LAYOUTS[name]
    given = {**neuron_config(tp, ep, batch, torch_dtype="float32"), **own, **options}
    given["blockwise_matmul_config"]["parallelize_token_to_block_mapping"] = True
    return given


def case_of(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """The sequences, with the order in which they arrive where each has its own line."""
    return {**case, "arrival": ARRIVAL} if "is_continuous_batching" in LAYOUTS[name][2] else case
