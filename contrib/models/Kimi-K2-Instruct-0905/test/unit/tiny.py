"""A model of a few megabytes, and its application."""

import torch

TINY = {
    "model_type": "kimi_k2", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 192,
    "moe_intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4,
    "n_routed_experts": 24, "n_shared_experts": 1, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 24, "max_position_embeddings": 4096, "rope_theta": 50000.0,
    "rms_norm_eps": 1e-6, "norm_topk_prob": True, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "hidden_act": "silu",
}  # fmt: skip


def application(fields, path="none", **options):
    """NeuronKimiK2ForCausalLM on one rank, not loaded."""
    import src

    sizes = {"tp_degree": 1, "seq_len": 64, "max_context_length": 64, "on_cpu": True, "torch_dtype": torch.float32}
    neuron = src.KimiK2NeuronConfig(**{**sizes, **options})
    config = src.KimiK2InferenceConfig(neuron, load_config=src.load_kimi_config(fields))
    return src.NeuronKimiK2ForCausalLM(path, config)


def reference(seed=0, fields=TINY):
    """transformers' model with weights in which the routers' biases matter."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    known = {name: value for name, value in fields.items() if name not in ("model_type", "quantization_config")}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**known, attn_implementation="eager")).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            tensor.data.normal_(0, 0.2)
        elif tensor.dim() == 2:
            tensor.data.normal_(0, tensor.shape[1] ** -0.5)
    return model
