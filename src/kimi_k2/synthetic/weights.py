"""Random weights, every tensor from its own generator: the same seed gives the same bytes whatever the order."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import TensorSpec, expected_tensors
from kimi_k2.config import KimiK2Config
from kimi_k2.quantization.fp8_block import E4M3_MAX

# Sigmoid scores of unit-variance logits spread over about 0.2; a bias of half of that decides many selections.
ROUTER_BIAS_STD = 0.1
# The largest of 128 x 128 Gaussian values is typically 4.2 standard deviations out.
_BLOCK_SIGMAS = 4.2
# Root mean square of a scale factor uniform over 0.5 to 1.5.
_SPREAD_RMS = math.sqrt(13 / 12)
_CHUNK = 2**24


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


def _e4m3_table() -> Tensor:
    """65536 e4m3 codes whose quantiles are a Gaussian's, scaled so that a 128x128 block just reaches 448."""
    quantiles = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)
    values = (quantiles * (E4M3_MAX / _BLOCK_SIGMAS)).clamp(-E4M3_MAX, E4M3_MAX)
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def _fill(count: int, dtype: torch.dtype, draw: Callable[[int], Tensor]) -> Tensor:
    """Draw a flat tensor in chunks, since an intermediate of 4 to 8 bytes a value would dwarf the result."""
    flat = torch.empty(count, dtype=dtype)
    for start in range(0, count, _CHUNK):
        size = min(_CHUNK, count - start)
        flat[start : start + size] = draw(size)
    return flat


class SyntheticWeights:
    """Deterministic random tensors for any TensorSpec of a configuration.

    Linear weights have variance 1 / input columns, so that activations keep their size through any depth, and
    q_b_proj makes up for YaRN's softmax magnitude, so that attention logits have unit variance too. Router biases are
    normal with standard deviation ROUTER_BIAS_STD.
    """

    def __init__(self, config: KimiK2Config, seed: int = 0) -> None:
        self.config = config
        self.seed = seed
        self._table: Tensor | None = None

    def tensor(self, spec: TensorSpec) -> Tensor:
        """The tensor of `spec`, in its dtype and shape."""
        generator = _generator(self.seed, spec.name)
        count = torch.Size(spec.shape).numel()
        suffix = spec.name.rpartition(".")[2]

        def normal(std: float, mean: float = 0.0) -> Tensor:
            def draw(size: int) -> Tensor:
                return torch.randn(size, generator=generator).mul_(std).add_(mean)

            return _fill(count, spec.dtype, draw).view(spec.shape)

        if suffix == "weight_shape":
            return torch.tensor(self._linear_shape(spec), dtype=torch.int32)
        if suffix == "e_score_correction_bias":
            return normal(ROUTER_BIAS_STD)
        if suffix in ("weight_scale_inv", "weight_scale"):
            # One standard deviation of the stored codes: Gaussian e4m3, or int4 uniform over -7..7.
            code_std = E4M3_MAX / _BLOCK_SIGMAS if suffix == "weight_scale_inv" else math.sqrt(56 / 3)
            spread = torch.rand(count, generator=generator).add_(0.5).div_(_SPREAD_RMS)
            return (spread * (self._linear_std(spec) / code_std)).to(spec.dtype).view(spec.shape)
        if suffix == "weight_packed":
            return self._packed_int4(count, generator).view(spec.shape)
        if spec.dtype == torch.float8_e4m3fn:
            codes = _fill(count, torch.uint8, lambda size: self._e4m3_codes(size, generator))
            return codes.view(torch.float8_e4m3fn).view(spec.shape)
        if len(spec.shape) == 1:
            return normal(0.1, mean=1.0)
        return normal(1.0 if "embed_tokens" in spec.name else self._linear_std(spec))

    def _linear_std(self, spec: TensorSpec) -> float:
        """Standard deviation of the dequantized weight that `spec` is, or scales."""
        is_scale = "scale" in spec.name.rpartition(".")[2]
        columns = self._linear_shape(spec)[1] if is_scale else spec.shape[-1]
        yarn = self.config.rope_scaling if "q_b_proj" in spec.name else None
        return 1 / (math.sqrt(columns) * (yarn.softmax_multiplier if yarn else 1.0))

    def _linear_shape(self, spec: TensorSpec) -> tuple[int, int]:
        module = spec.name.rpartition(".")[0]
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

    def _e4m3_codes(self, size: int, generator: torch.Generator) -> Tensor:
        if self._table is None:
            self._table = _e4m3_table()
        # 64 random bits give four table indices; the generator is the slow part.
        words = torch.empty(-(-size // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
        indices = words.view(torch.int16)[:size].to(torch.int32) & 0xFFFF
        return self._table[indices]

    @staticmethod
    def _packed_int4(count: int, generator: torch.Generator) -> Tensor:
        def draw(size: int) -> Tensor:
            nibbles = torch.randint(1, 16, (size, 4, 2), dtype=torch.uint8, generator=generator)
            return (nibbles[..., 0] | (nibbles[..., 1] << 4)).view(torch.int32).view(-1)

        return _fill(count, torch.int32, draw)


def iter_state(config: KimiK2Config, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `write_synthetic_checkpoint` would store, without a disk (names without prefix)."""
    weights = SyntheticWeights(config, seed)
    for spec in expected_tensors(config):
        yield spec.name, weights.tensor(spec)
