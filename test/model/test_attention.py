"""MLA against transformers far into the context; which form is cheaper; rotary tables; the cache."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch

from kimi_k2.config import KimiK2Config, raw_preset
from kimi_k2.model.attention import MultiHeadLatentAttention, absorbed_is_cheaper
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.rope import RotaryEmbedding, rope_inv_freq
from kimi_k2.synthetic.config import tiny_config, with_format

transformers = pytest.importorskip("transformers")
REAL = KimiK2Config.from_preset("kimi-k2-instruct-0905")


def random_attention(config: KimiK2Config, seed: int = 0) -> MultiHeadLatentAttention:
    attention = MultiHeadLatentAttention(with_format(config, "bf16"), 0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for parameter in attention.parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 1.0
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
    return attention


@pytest.mark.parametrize(
    ("name", "yarn"),
    [
        *((name, {}) for name in ("kimi-k2-instruct", "kimi-k2-instruct-0905", "kimi-k2-thinking", "kimi-k2.5")),
        ("kimi-k2.5", {"truncate": False}),
        ("kimi-k2.5", {"beta_fast": 0.5, "truncate": False}),
        ("kimi-k2.5", {"beta_fast": 1.0, "truncate": False}),
        ("kimi-k2.5", {"beta_fast": 0.01}),
    ],
)
def test_yarn_against_transformers(name: str, yarn: dict[str, Any]) -> None:
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    raw = raw_preset(name)
    raw = raw.get("text_config", raw)
    raw["rope_scaling"] |= yarn
    config = KimiK2Config.from_dict(raw)
    kept = {
        key: value for key, value in raw.items() if key not in ("model_type", "architectures", "quantization_config")
    }
    theirs = DeepseekV3RotaryEmbedding(transformers.DeepseekV3Config(**copy.deepcopy(kept)))
    torch.testing.assert_close(rope_inv_freq(config), theirs.inv_freq, rtol=0, atol=0)
    positions = torch.tensor([[0, 1, 4095, 4096, config.max_position_embeddings - 1]])
    cos, sin = RotaryEmbedding(config)(positions, torch.float32)
    half = config.qk_rope_head_dim // 2
    expected = theirs(torch.zeros(1), positions)
    assert torch.equal(cos, expected[0][..., :half])
    assert torch.equal(sin, expected[1][..., :half])


@torch.inference_mode()
def test_decode_equals_transformers_far_into_the_context() -> None:
    """YaRN's interpolated pairs only matter at large positions."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    config = tiny_config(max_position_embeddings=262144)
    raw = with_format(config, "bf16").to_hf_dict()
    raw = {key: value for key, value in raw.items() if key not in ("model_type", "architectures")}
    hf_config = transformers.DeepseekV3Config(**raw, attn_implementation="eager")
    theirs = DeepseekV3Attention(hf_config, 0).double().eval()
    ours = random_attention(config)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, 6, config.hidden_size, dtype=torch.float64)
    far = torch.tensor([[0, 1, 2, 3, 4, 5]]) + 200_000
    causal = torch.full((1, 1, 6, 6), float("-inf")).triu(1)
    expected = theirs(x, DeepseekV3RotaryEmbedding(hf_config)(x, far), causal)[0]
    # Without a cache our mask counts from position 0; the rotation alone says how far into the context we are.
    with patch("kimi_k2.model.attention.absorbed_is_cheaper", return_value=True):
        out = ours(x, far - 200_000, RotaryEmbedding(config)(far, torch.float64), None, 6)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)


def test_auto_form_is_naive_for_long_prefill_and_absorbed_for_decode() -> None:
    assert absorbed_is_cheaper(REAL, 1, 1) or absorbed_is_cheaper(REAL, 1, 2)
    assert absorbed_is_cheaper(REAL, 1, 8192)
    assert not absorbed_is_cheaper(REAL, 2048, 2048)


def test_cache_holds_576_values_a_token_a_layer_once() -> None:
    cache = LatentCache(REAL, 1, 10, dtype=torch.bfloat16)
    assert cache.data.nbytes == 10 * 61 * 576 * 2
