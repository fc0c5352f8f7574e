"""Decode whose router logits are summed with the attention's output, in NxD's CPU mode: the plain model's logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from harness import neuron_config
from test_nki_kernels import ALL, LAYOUTS, check, options, store

from kimi_k2.errors import ConfigError

BATCHING: dict[str, Any] = {
    "is_continuous_batching": True, "ctx_batch_size": 1, "tkg_batch_size": 4, "max_batch_size": 4,
}  # fmt: skip
EACH_OTHER_FEATURE = pytest.mark.parametrize(
    ("layout", "more"),
    [("EP2", BATCHING), ("TP2", {"sequence_parallel_enabled": True}), ("TP2", {"flash_decoding_enabled": True})],
    ids=["continuous batching", "sequence parallelism", "flash decoding"],
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model in BF16 and in FP8 blocks."""
    return store(tmp_path_factory.mktemp("early"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prefill_and_16_steps(stored: dict[str, Path], tmp_path: Path, layout: str) -> None:
    check(stored["bf16"], neuron_config(*LAYOUTS[layout], 4, early_router=True), tmp_path, [])


@pytest.mark.parametrize(("layout", "fmt"), [("TP1", "bf16"), ("TP2", "bf16"), ("EP2", "bf16"), ("EP2", "fp8")])
def test_with_all_kernels(stored: dict[str, Path], tmp_path: Path, layout: str, fmt: str) -> None:
    """The router's kernel takes the logits: what its own weight is read for is prefill."""
    kernels = {"router": "noaux_tc_choice"}
    check(stored[fmt], options(layout, 2, ALL, fmt, early_router=True), tmp_path, ALL, names=kernels)


@EACH_OTHER_FEATURE
def test_together_with(stored: dict[str, Path], tmp_path: Path, layout: str, more: dict[str, Any]) -> None:
    case: dict[str, Any] = {"arrival": [2, 0, 3, 1]} if more is BATCHING else {}
    check(stored["fp8"], neuron_config(*LAYOUTS[layout], 4, early_router=True, **more), tmp_path, [], **case)


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("lora_config", {"lora_config": {"max_loras": 2}}),
        ("rpl_reduce_dtype", {"rpl_reduce_dtype": "bfloat16"}),
        ("speculation_length", {"speculation_length": 4}),
    ],
)
def test_what_it_does_not_follow_is_refused(field: str, more: dict[str, Any]) -> None:
    config_module: Any = environment.contrib("config")
    given = neuron_config(1, 1, 4, early_router=True, **more)
    with pytest.raises(ConfigError) as caught:
        config_module.KimiK2NeuronConfig(on_cpu=True, torch_dtype=torch.float32, **given)
    assert caught.value.field == field
