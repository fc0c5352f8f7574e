"""A tiny FP8 checkpoint whose projections are wide enough for two ranks to cut them at block borders."""

from __future__ import annotations

from pathlib import Path

import pytest

from kimi_k2.checkpoint.synthetic import tiny_config, write_synthetic_checkpoint
from kimi_k2.config import KimiK2Config


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide")
    sizes = {"moe_intermediate_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "v_head_dim": 64}
    sizes |= {"num_key_value_heads": 8, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "num_hidden_layers": 2}
    write_synthetic_checkpoint(directory, tiny_config("kimi-k2-instruct-0905", **sizes), seed=9)
    return directory


@pytest.fixture(params=["kimi-k2-instruct-0905", "kimi-k2-thinking"])
def for_gpus(request: pytest.FixtureRequest) -> KimiK2Config:
    """Sizes that kernels take and that four ranks can cut, in FP8 and INT4."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "intermediate_size": 512, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 8, "v_head_dim": 64, "num_key_value_heads": 8, "qk_nope_head_dim": 64}
    return tiny_config(request.param, **sizes, qk_rope_head_dim=64)
