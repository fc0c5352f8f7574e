"""Random weights, every tensor from its own generator: the same seed gives the same bytes whatever the order."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from kimi_k2.checkpoint.vision_names import VISION
from kimi_k2.config import KimiK2Config
from kimi_k2.quantization.draw import filled
from kimi_k2.quantization.stored import TensorSpec, format_of

# Sigmoid scores of unit-variance logits spread over about 0.2; a bias of half of that decides many selections.
ROUTER_BIAS_STD = 0.1


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class SyntheticWeights:
    """Deterministic random tensors for any TensorSpec of a configuration.

    Linear weights have variance 1 / input columns, so that activations keep their size through any depth, and
    q_b_proj makes up for YaRN's softmax magnitude, so that attention logits have unit variance too. Router biases are
    normal with standard deviation ROUTER_BIAS_STD.
    """

    def __init__(self, config: KimiK2Config, seed: int = 0) -> None:
        self.config = config
        self.seed = seed

    def tensor(self, spec: TensorSpec) -> Tensor:
        """The tensor of `spec`, in its dtype and shape."""
        module, _, suffix = spec.name.rpartition(".")
        if VISION.match(spec.name):
            return self._vision(spec, suffix)
        held = format_of(self.config.quantization, module)
        if len(held.suffixes) > 1:
            rows, columns = self._linear_shape(module)
            std = self._linear_std(module, columns)
            return held.draw(suffix, rows, columns, std, lambda own: _generator(self.seed, f"{module}.{own}"))
        if suffix == "e_score_correction_bias":
            return self._normal(spec, ROUTER_BIAS_STD)
        if len(spec.shape) == 1:
            return self._normal(spec, 0.1, mean=1.0)
        return self._normal(spec, 1.0 if "embed_tokens" in module else self._linear_std(module, spec.shape[-1]))

    def _vision(self, spec: TensorSpec, suffix: str) -> Tensor:
        if len(spec.shape) == 1:
            return self._normal(spec, 0.1, mean=0.0 if suffix == "bias" else 1.0)
        if "pos_emb" in spec.name:
            return self._normal(spec, 1.0)
        return self._normal(spec, 1 / math.sqrt(math.prod(spec.shape[1:])))

    def _normal(self, spec: TensorSpec, std: float, mean: float = 0.0) -> Tensor:
        generator = _generator(self.seed, spec.name)

        def draw(size: int) -> Tensor:
            return torch.randn(size, generator=generator).mul_(std).add_(mean)

        return filled(math.prod(spec.shape), spec.dtype, draw).view(spec.shape)

    def _linear_std(self, module: str, columns: int) -> float:
        yarn = self.config.rope_scaling if "q_b_proj" in module else None
        return 1 / (math.sqrt(columns) * (yarn.softmax_multiplier if yarn else 1.0))

    def _linear_shape(self, module: str) -> tuple[int, int]:
        projection = module.rpartition(".")[2]
        config = self.config
        heads = config.num_attention_heads
        if ".experts." in module:
            intermediate = config.moe_intermediate_size
        elif "shared_experts" in module:
            intermediate = config.moe_intermediate_size * config.n_shared_experts
        else:
            intermediate = config.intermediate_size
        return {
            "q_a_proj": (config.q_lora_rank, config.hidden_size),
            "q_b_proj": (heads * config.qk_head_dim, config.q_lora_rank),
            "kv_a_proj_with_mqa": (config.cache_dim, config.hidden_size),
            "kv_b_proj": (heads * (config.qk_nope_head_dim + config.v_head_dim), config.kv_lora_rank),
            "o_proj": (config.hidden_size, heads * config.v_head_dim),
            "gate_proj": (intermediate, config.hidden_size),
            "up_proj": (intermediate, config.hidden_size),
            "down_proj": (config.hidden_size, intermediate),
        }[projection]
