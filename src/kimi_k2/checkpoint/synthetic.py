"""Synthetic checkpoints in the exact Hugging Face layout: real names, dtypes and shards, random weights.

Every tensor is drawn from its own generator, seeded by (seed, name): the same seed gives the same bytes whatever
the order, and a checkpoint of tens of gigabytes needs no more memory than its largest tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import LAYER, TensorSpec, expected_tensors
from kimi_k2.checkpoint.writer import SafetensorsWriter, write_index, write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.config import Fp8BlockQuantization, Int4GroupQuantization
from kimi_k2.quantization.fp8_block import E4M3_MAX
from kimi_k2.tokenization.special_tokens import NUM_SPECIAL_SLOTS
from kimi_k2.tokenization.vocabulary import write_synthetic_vocabulary

Format = Literal["fp8", "int4", "bf16"]

# Sigmoid scores of unit-variance logits spread over about 0.2; a bias of half of that decides many selections.
ROUTER_BIAS_STD = 0.1
# The largest of 128 x 128 Gaussian values is typically 4.2 standard deviations out.
_BLOCK_SIGMAS = 4.2
# Root mean square of a scale factor uniform over 0.5 to 1.5.
_SPREAD_RMS = math.sqrt(13 / 12)
_CHUNK = 2**24
# Offsets into the special slots at the end of the vocabulary.
_BOS, _EOS, _IM_END, _PAD = 0, 1, 2, 255

TINY: dict[str, Any] = {
    "vocab_size": 768,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 8192,
}


def tiny_config(preset: str = "kimi-k2-instruct-0905", **overrides: Any) -> KimiK2Config:
    """A published configuration shrunk to a few megabytes; YaRN, router and quantization stay as published.

    Args:
        preset: name of the published configuration.
        overrides: any fields of KimiK2Config, Hugging Face's names.
    """
    vocab_size = overrides.get("vocab_size", TINY["vocab_size"])
    ids = {"bos_token_id": _BOS, "eos_token_id": _EOS, "pad_token_id": _PAD}
    special = {field: vocab_size - NUM_SPECIAL_SLOTS + offset for field, offset in ids.items()}
    return KimiK2Config.from_preset(preset, **{**TINY, **special, **overrides})


def with_format(config: KimiK2Config, fmt: Format) -> KimiK2Config:
    """The same model stored as `fp8` (128x128 blocks), `int4` (groups of 32) or `bf16`."""
    quantization = {"fp8": Fp8BlockQuantization(), "int4": Int4GroupQuantization(), "bf16": None}
    if fmt not in quantization:
        raise ConfigError(f"expected one of {', '.join(quantization)}, got {fmt!r}", field="format")
    return config.model_copy(update={"quantization": quantization[fmt]})


def with_bf16_down(config: KimiK2Config) -> KimiK2Config:
    """The same INT4 model, whose `ignore` list leaves the routed experts' down_proj in BF16.

    Raises:
        ConfigError: the model is not stored in INT4.
    """
    quantization = config.quantization
    if not isinstance(quantization, Int4GroupQuantization):
        raise ConfigError("expected INT4 groups", field="quantization_config")
    ignore = (*quantization.ignore, r"re:.*mlp\.experts\.\d+\.down_proj")
    return config.model_copy(update={"quantization": quantization.model_copy(update={"ignore": ignore})})


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


def shard_plan(config: KimiK2Config, shards: int | None = None) -> list[list[TensorSpec]]:
    """Spread the tensors over files as the published checkpoints do: a layer a file, the rest at both ends.

    Args:
        shards: number of files; None for one a layer. Fewer merge neighbouring layers, more split by size.
    """
    specs = list(expected_tensors(config))
    if shards is None or shards == config.num_hidden_layers:
        groups: list[list[TensorSpec]] = [[] for _ in range(config.num_hidden_layers)]
        for spec in specs:
            match = LAYER.match(spec.name)
            layer = int(match[1]) if match else (0 if "embed_tokens" in spec.name else -1)
            groups[layer].append(spec)
        return groups
    if not 1 <= shards <= len(specs):
        raise ConfigError(f"expected 1 to {len(specs)}, got {shards}", field="shards")
    total = sum(spec.nbytes for spec in specs)
    groups = [[] for _ in range(shards)]
    done = 0
    for spec in specs:
        groups[min(done * shards // total, shards - 1)].append(spec)
        done += spec.nbytes
    return [group for group in groups if group]


def write_synthetic_checkpoint(
    directory: str | Path,
    config: KimiK2Config,
    *,
    seed: int = 0,
    shards: int | None = None,
    on_tensor: Callable[[TensorSpec], None] | None = None,
) -> int:
    """Write a whole checkpoint: shards, index, config.json, generation_config.json and the tokenizer files.

    An interrupted run leaves finished shards; a rerun with the same arguments rewrites only the others.

    Args:
        directory: created if missing.
        config: decides format (`config.quantization`) and names (`config.tensor_prefix`); see `with_format`.
        seed: of the weights; the same seed gives the same bytes.
        shards: number of shard files, None for one a layer.
        on_tensor: called after each tensor, for a progress bar.

    Returns:
        Bytes of tensor data.

    Raises:
        ConfigError: the directory holds another checkpoint, or `shards` is out of range.
        TokenizerError: the vocabulary is too small for 256 bytes and 256 special slots.
        CheckpointError: the disk is full.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    recipe = {"seed": seed, "shards": shards, "config": hf_config(config)}
    _claim(directory, recipe)
    write_synthetic_vocabulary(directory, config.vocab_size)
    weights = SyntheticWeights(config, seed)
    plan = shard_plan(config, shards)
    weight_map: dict[str, str] = {}
    total = 0
    for number, group in enumerate(plan, start=1):
        name = f"model-{number}-of-{len(plan)}.safetensors"
        stored = [TensorSpec(config.tensor_prefix + spec.name, spec.dtype, spec.shape) for spec in group]
        weight_map.update((spec.name, name) for spec in stored)
        total += sum(spec.nbytes for spec in stored)
        finished = (directory / name).exists()
        if not finished:
            with SafetensorsWriter(directory / name, stored) as writer:
                for spec, renamed in zip(group, stored, strict=True):
                    writer.write(renamed.name, weights.tensor(spec))
                    if on_tensor:
                        on_tensor(spec)
        elif on_tensor:
            for spec in group:
                on_tensor(spec)
    write_json(directory / "config.json", recipe["config"])
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.vocab_size - NUM_SPECIAL_SLOTS + _IM_END}
    write_json(directory / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    write_index(directory, weight_map, total)
    (directory / RECIPE_NAME).unlink()
    return total


RECIPE_NAME = "synthetic.partial.json"


def _claim(directory: Path, recipe: dict[str, Any]) -> None:
    """Refuse to mix two checkpoints in one directory; allow resuming the same one."""
    path = directory / RECIPE_NAME
    if path.exists():
        if json.loads(path.read_text()) != recipe:
            raise ConfigError("an unfinished checkpoint with other arguments lies here", file=path)
    elif any(directory.glob("*.safetensors")):
        raise ConfigError("holds a checkpoint already; give an empty directory", file=directory)
    write_json(path, recipe)


def hf_config(config: KimiK2Config) -> dict[str, Any]:
    """The config.json content, wrapped in `text_config` if the names carry a prefix."""
    plain = config.to_hf_dict()
    if not config.tensor_prefix:
        return plain
    outer: dict[str, Any] = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": plain,
    }
    if "quantization_config" in plain:
        outer["quantization_config"] = plain["quantization_config"]
    return outer


def iter_state(config: KimiK2Config, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """The tensors that `write_synthetic_checkpoint` would store, without a disk (names without prefix)."""
    weights = SyntheticWeights(config, seed)
    for spec in expected_tensors(config):
        yield spec.name, weights.tensor(spec)
