"""Fields and options: followed, or refused by name; YaRN as transformers has it."""

import pytest
from tiny import TINY, application

YARN = {
    "type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 1.0, "beta_slow": 1.0,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip


def refused(config=None, **options):
    """The name of the field or option that is refused."""
    import src

    with pytest.raises(src.ConfigError) as caught:
        application(config or TINY, **options)
    return caught.value.field


def test_defaults_are_those_of_one_trn2_48xlarge():
    import src

    neuron = src.KimiK2NeuronConfig()
    assert (neuron.tp_degree, neuron.moe_tp_degree, neuron.moe_ep_degree, neuron.logical_nc_config) == (64, 32, 2, 2)
    neuron = src.KimiK2NeuronConfig(moe_tp_degree=64)
    assert (neuron.moe_tp_degree, neuron.moe_ep_degree) == (64, 1)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"fused_qkv": True}, "fused_qkv"),
        ({"no_such_option": 1}, "no_such_option"),
        ({"capacity_factor": 1.0}, "capacity_factor"),
        ({"max_length": 128}, "max_length"),
        ({"enable_long_context_mode": True}, "enable_long_context_mode"),
        ({"moe_tp_degree": 3}, "moe_tp_degree"),
        ({"output_logits": True}, "output_logits"),
        ({"quantized": True, "quantization_type": "per_tensor_symmetric"}, "quantization_type"),
        ({"quantized": True, "quantization_block_size": [32, 32]}, "quantization_block_size"),
        ({"blockwise_matmul_config": {"use_torch_block_wise": False}}, "blockwise_matmul_config.use_torch_block_wise"),
        ({"context_encoding_buckets": [16]}, "context_encoding_buckets"),
    ],
)
def test_options_are_refused_by_name(options, field):
    assert refused(**options) == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"new_field": 1}, "new_field"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"n_group": 8}, "n_group"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"rope_scaling": {**YARN, "type": "linear"}}, "rope_scaling.type"),
        ({"rope_scaling": {**YARN, "new": 1}}, "rope_scaling.new"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.quant_method"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
    ],
)
def test_fields_are_refused_by_name(change, field):
    assert refused({**TINY, **change}) == field


def test_a_missing_field_is_named():
    assert refused({name: value for name, value in TINY.items() if name != "kv_lora_rank"}) == "kv_lora_rank"


@pytest.mark.parametrize("change", [{}, {"beta_fast": 32.0}, {"mscale": 0.7, "mscale_all_dim": 1.2}, {"factor": 4.0}])
def test_yarn(change):
    import torch
    from transformers import DeepseekV3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    fields = {**TINY, "rope_scaling": {**YARN, **change}}
    config = application(fields).config
    reference = DeepseekV3Config(**{name: value for name, value in fields.items() if name != "model_type"})
    expected, multiplier = ROPE_INIT_FUNCTIONS["yarn"](reference, "cpu")
    found, own = config.rotary()
    torch.testing.assert_close(torch.tensor(found), expected.float(), rtol=1e-6, atol=0)
    assert own == pytest.approx(multiplier)


def test_a_saved_config_is_read_back(tmp_path):
    import src

    neuron = src.KimiK2NeuronConfig(tp_degree=1, quantized=True)
    config = src.KimiK2InferenceConfig(neuron, load_config=src.load_kimi_config(TINY))
    config.save(str(tmp_path))
    again = type(config).load(str(tmp_path))
    assert again.to_json_string() == config.to_json_string()
