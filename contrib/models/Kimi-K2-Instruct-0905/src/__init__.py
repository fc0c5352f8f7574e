"""Kimi-K2 for NxD Inference: `modeling_kimi_k2.NeuronKimiK2ForCausalLM` and what it needs."""
