"""Sizes for ranks on GPUs."""

from __future__ import annotations

import pytest

from kimi_k2.config import KimiK2Config
from kimi_k2.synthetic.config import tiny_config


@pytest.fixture(params=["kimi-k2-instruct-0905", "kimi-k2-thinking"])
def for_gpus(request: pytest.FixtureRequest) -> KimiK2Config:
    """Sizes that kernels take and that four ranks can cut, in FP8 and INT4."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "intermediate_size": 512, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 8, "v_head_dim": 64, "num_key_value_heads": 8, "qk_nope_head_dim": 64}
    return tiny_config(request.param, **sizes, qk_rope_head_dim=64)
