"""Prefix caching with the latent cache in blocks: CPU mode and executed graphs, float32, the plain model.

With flash decoding every block is split over the ranks of a group by its positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from harness import SLOW, execute, launch, neuron_config, plain_model
from prefix import script
from test_nki_kernels import CONFIG

from kimi_k2.errors import ConfigError
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import with_format

TOLERANCE = 2e-5
COMMON = 16
BLOCK = 8
FLASH: dict[str, Any] = {"flash_decoding_enabled": True}
# A rank's part of the cache is a multiple of 128 slots at LNC=1.
KERNELS: dict[str, Any] = {
    "decode": "kernels", "logical_nc_config": 1, "seq_len": 256, "token_generation_buckets": [256], "pa_num_blocks": 50,
}  # fmt: skip
# Tensor and expert parallelism, and options.
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "TP1": (1, 1, {}),
    "TP2xEP2": (2, 2, {}),
    "flash TP2": (2, 1, FLASH),
    "flash TP4 in groups of 2": (4, 1, FLASH | {"num_cores_per_group": 2}),
    "flash TP2xEP2": (2, 2, FLASH),
    "flash TP2, decode on kernels": (2, 1, FLASH | KERNELS),
}
# The kernels of router and experts on their emulator; executed graphs have their PyTorch forms.
CPU_MODE = ("TP1", "TP2xEP2", "flash TP2", "flash TP2, decode on kernels", pytest.param("flash TP2xEP2", marks=SLOW))
BLOCKS: dict[str, Any] = {
    "is_prefix_caching": True, "is_block_kv_layout": True, "pa_block_size": BLOCK, "pa_num_blocks": 30,
    "is_continuous_batching": True, "ctx_batch_size": 1, "tkg_batch_size": 4, "max_batch_size": 4,
    "enable_bucketing": True, "max_context_length": 24, "context_encoding_buckets": [8, 24], "prefix_buckets": [32],
    "token_generation_buckets": [48],
}  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prefix") / "source"
    config = CONFIG.model_copy(update={"num_hidden_layers": 2})  # of sizes that kernels take
    write_synthetic_checkpoint(directory, with_format(config, "bf16"), seed=6)
    return directory


def job(source: Path, layout: str) -> tuple[dict[str, Any], torch.Tensor]:
    """A job of one script, and the plain model's logits of each of its rows."""
    draw = torch.Generator().manual_seed(8)
    rows = torch.randint(0, 512, (4, 48), generator=draw)
    rows[:, :COMMON] = rows[0, :COMMON]
    steps, of = script(rows.tolist(), COMMON)
    tp, ep, options = LAYOUTS[layout]
    neuron = neuron_config(tp, ep, 4, torch_dtype="float32", **{**BLOCKS, **options})
    model = plain_model(source)
    with torch.inference_mode():
        plain = torch.stack([model(torch.tensor([tokens]))[0, -1] for tokens in of])
    return {"checkpoint": source, "neuron_config": neuron, "cases": [{"script": steps}]}, plain


@pytest.mark.parametrize("layout", CPU_MODE)
def test_cpu_mode(source: Path, tmp_path: Path, layout: str) -> None:
    made, plain = job(source, layout)
    (logits,) = launch(made, tmp_path)
    print(f"\n{layout}: max |difference| to the plain model {float((logits - plain).abs().max()):.1e}")
    torch.testing.assert_close(logits, plain, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_executed(source: Path, tmp_path: Path, layout: str) -> None:
    """Prefixes are read from the cache, or computed again where they fit into the bucket: NxDI chooses."""
    made, plain = job(source, layout)
    made["neuron_config"]["blockwise_matmul_config"]["parallelize_token_to_block_mapping"] = True
    done = execute(made, tmp_path)
    prefills = {tuple(bucket) for stage, bucket in done["calls"] if stage == "context_encoding_model"}
    assert prefills == {(24, 0), (8, 0), (8, 32), (24, 32)}
    (logits,) = done["logits"]
    print(f"\n{layout}, executed: max |difference| to the plain model {float((logits - plain).abs().max()):.1e}")
    torch.testing.assert_close(logits, plain, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("given", "field"), [
    ({"is_block_kv_layout": False}, "is_block_kv_layout"),
    ({"is_prefix_caching": False}, "is_prefix_caching"),
    ({"pa_num_blocks": 5}, "pa_num_blocks"),
    ({"pa_block_size": 7}, "max_context_length"),
    ({"prefix_buckets": [12]}, "prefix_buckets"),
    ({"token_generation_buckets": [20, 48]}, "token_generation_buckets"),
    ({"speculation_length": 3}, "speculation_length"),
    ({"sequence_parallel_enabled": True}, "sequence_parallel_enabled"),
    ({"async_mode": True, "on_device_sampling_config": {"top_k": 1}}, "async_mode"),
    ({"chunked_prefill_config": {"max_num_seqs": 2}}, "chunked_prefill_config"),
])  # fmt: skip
def test_combinations(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        environment.contrib("config").KimiK2NeuronConfig(**neuron_config(1, 1, 4, **{**BLOCKS, **given}))


def test_a_block_divides_among_the_ranks_of_a_group() -> None:
    sizes = {"pa_block_size": 3, "prefix_buckets": [18], "context_encoding_buckets": [24]}
    with pytest.raises(ConfigError, match="pa_block_size"):
        environment.contrib("config").KimiK2NeuronConfig(**neuron_config(2, 1, 4, **{**BLOCKS, **sizes, **FLASH}))
