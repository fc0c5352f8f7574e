"""KimiK2Config: the published configurations, both transformers generations, and every way to be wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kimi_k2.config import KimiK2Config, published, raw_preset
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.fp8_block import Fp8BlockFormat
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.synthetic.config import hf_config, tiny_config

PRESETS = published()


# name: (max_position, eps, factor, beta_fast, quantization, prefix, softmax scale), from the facts file
EXPECTED = {
    "kimi-k2-instruct": (131072, 1e-6, 32, 1, Fp8BlockFormat, "", 0.13086),
    "kimi-k2-instruct-0905": (262144, 1e-6, 64, 1, Fp8BlockFormat, "", 0.14468),
    "kimi-k2-thinking": (262144, 1e-5, 64, 1, Int4GroupFormat, "", 0.14468),
    "kimi-k2.5": (262144, 1e-5, 64, 32, Int4GroupFormat, "language_model.", 0.14468),
    "kimi-k2.6": (262144, 1e-5, 64, 32, Int4GroupFormat, "language_model.", 0.14468),
    "kimi-k2.7-code": (262144, 1e-5, 64, 32, Int4GroupFormat, "language_model.", 0.14468),
}


@pytest.mark.parametrize("name", PRESETS)
def test_published_configs(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_preset(name)))
    config = KimiK2Config.from_pretrained(tmp_path)
    positions, eps, factor, beta_fast, quantization, prefix, scale = EXPECTED[name]
    assert config.rope_scaling is not None
    assert (config.max_position_embeddings, config.rms_norm_eps) == (positions, eps)
    assert (config.rope_scaling.factor, config.rope_scaling.beta_fast) == (factor, beta_fast)
    assert isinstance(config.quantization, quantization)
    assert config.tensor_prefix == prefix
    assert config.softmax_scale == pytest.approx(scale, abs=5e-6)
    assert config.rope_scaling.rotary_multiplier == 1.0
    assert (config.qk_head_dim, config.cache_dim, config.latent_norm_eps) == (192, 576, 1e-6)
    assert [config.is_moe_layer(layer) for layer in (0, 1, 60)] == [False, True, True]


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_5_writes_the_same_model(name: str) -> None:
    """transformers itself saves the config with rope_parameters; what it writes must read back the same."""
    transformers = pytest.importorskip("transformers")
    ours = KimiK2Config.from_preset(name)
    raw = ours.to_hf_dict()
    for key in ("model_type", "architectures", "quantization_config"):
        raw.pop(key, None)
    saved = json.loads(transformers.DeepseekV3Config(**raw).to_json_string(use_diff=False))
    again = KimiK2Config.from_dict(saved)
    same = ours.model_copy(update={"quantization": None, "tensor_prefix": "", "model_type": "deepseek_v3"})
    for field in ("softmax_scale", "rope_theta", "rope_scaling", "n_routed_experts", "topk_group", "kv_lora_rank"):
        assert getattr(again, field) == getattr(same, field), field


def test_missing_factor_is_the_ratio_of_the_lengths() -> None:
    raw = raw_preset()
    raw["rope_scaling"]["factor"] = None
    config = KimiK2Config.from_dict(raw)
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 262144 / 4096


def test_int4_ignore_list_decides_by_module() -> None:
    quantization = KimiK2Config.from_preset("kimi-k2-thinking").quantization
    assert quantization is not None
    root = "model.layers.3"
    assert quantization.quantizes(f"{root}.mlp.experts.7.gate_proj")
    for module in ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.down_proj", "mlp.gate"):
        assert not quantization.quantizes(f"{root}.{module}"), module
    assert not quantization.quantizes("lm_head")


@pytest.mark.parametrize("name", ["kimi-k2-instruct-0905", "kimi-k2-thinking", "kimi-k2.5"])
def test_written_config_reads_back(name: str) -> None:
    config = tiny_config(name)
    assert KimiK2Config.from_dict(json.loads(json.dumps(hf_config(config)))) == config


REQUIRED = sorted(name for name, field in KimiK2Config.model_fields.items() if field.is_required())


@pytest.mark.parametrize("field", REQUIRED)
def test_each_missing_field_is_named(field: str, tmp_path: Path) -> None:
    raw = raw_preset()
    del raw[field]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ConfigError) as caught:
        KimiK2Config.from_pretrained(tmp_path)
    assert (caught.value.field, caught.value.file) == (field, str(path))
    assert f"field '{field}': missing" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "field", "says"),
    [
        ({"n_group": 384, "topk_group": 384}, "n_group", "at least two experts"),
        ({"rope_scaling": None, "rope_parameters": {"rope_theta": 1.0}}, "rope_parameters.rope_theta", "top-level"),
    ],
)  # fmt: skip
def test_each_wrong_field_is_named(change: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        KimiK2Config.from_dict({**raw_preset(), **change}, file="somewhere/config.json")
    assert caught.value.field == field
    assert says in str(caught.value)
    assert str(caught.value).startswith("somewhere/config.json: field '")


def test_no_such_preset() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'gpt-5'; expected one of: kimi-k2-instruct"):
        KimiK2Config.from_preset("gpt-5")
    with pytest.raises(ConfigError, match=r"^field 'vocab_size'"):  # which is the caller's, and not the file's
        KimiK2Config.from_preset("kimi-k2-thinking", vocab_size=0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3),
    max_leaves=6,
)


@given(field=st.sampled_from(sorted(raw_preset())), value=json_values)
@example(field="eos_token_id", value=[5, 6])
@settings(max_examples=300, deadline=None)
def test_any_json_in_any_field_is_accepted_or_a_config_error(field: str, value: object) -> None:
    try:
        config = KimiK2Config.from_dict({**raw_preset(), field: value})
    except ConfigError as error:
        assert str(error)
    else:
        assert math.isfinite(config.softmax_scale)
        hash(config)  # what is computed of it is kept by it
