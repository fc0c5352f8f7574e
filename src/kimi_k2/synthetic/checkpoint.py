"""Synthetic checkpoints in the exact Hugging Face layout: real names, dtypes and shards, random weights.

A checkpoint of tens of gigabytes needs no more memory than its largest tensor. Every tensor has
a generator of its own: the same seed gives the same bytes whatever the order. Vocabularies may have any size.
"""

from __future__ import annotations

import base64
import hashlib
import math
import random
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import LAYER, VISION, all_tensors, layer_specs, stored_name
from kimi_k2.checkpoint.writer import FileLayout, SafetensorsFile, tensor_bytes, write_index, write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError, TokenizerError
from kimi_k2.files import LOCK, DirectoryLock, Json, read_data, replace_file
from kimi_k2.media.config import IMAGE_FILE, MediaConfig
from kimi_k2.quantization.draw import filled
from kimi_k2.quantization.stored import TensorSpec, format_of
from kimi_k2.synthetic.config import IM_END, hf_config
from kimi_k2.tokenization.chat import write_chat_template
from kimi_k2.tokenization.config_file import CONFIG_NAME
from kimi_k2.tokenization.special_tokens import NUM_SPECIAL_SLOTS, PAD, UNK, special_tokens
from kimi_k2.tokenization.style import ChatStyle
from kimi_k2.tokenization.tokenizer import VOCABULARY_NAME

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
        self.config, self.seed = config, seed
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {}

    def tensor(self, spec: TensorSpec) -> Tensor:
        """The tensor of `spec`, in its dtype and shape."""
        module, _, suffix = spec.name.rpartition(".")
        if VISION.match(spec.name):
            return self._vision(spec, suffix)
        stored_format = format_of(self.config.quantization, module)
        if len(stored_format.suffixes) > 1:
            rows, columns = self._linear_shape(module)
            std = self._linear_std(module, columns)
            return stored_format.draw(suffix, rows, columns, std, lambda own: _generator(self.seed, f"{module}.{own}"))
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

    def _linear_shape(self, module: str) -> tuple[int, ...]:
        """Of a Linear in floats, by the layer's tensors; kept for one layer."""
        layer = LAYER.match(module)
        assert layer is not None
        if layer[0] not in self._shapes:
            floats = self.config.model_copy(update={"quantization": None})
            self._shapes = {layer[0]: {spec.name: spec.shape for spec in layer_specs(floats, int(layer[1]))}}
        return self._shapes[layer[0]][f"{module}.weight"]


_COMMON = b" etaoinshrdlucmfwypvbgkjqxz"


def synthetic_ranks(base: int, *, seed: int = 0) -> dict[bytes, int]:
    """A vocabulary of `base` tokens: all bytes, then ever longer strings of common letters, each mergeable.

    A BPE merge joins two known tokens, so every prefix of a token is a token too. Seed 0 takes the letters by their
    frequency in English, any other seed in an order of its own.
    """
    if base < 256:
        raise TokenizerError(f"a vocabulary needs the 256 single bytes, got a size of {base}")
    letters_in_order = random.Random(seed).sample(_COMMON, len(_COMMON)) if seed else _COMMON
    tokens = [bytes([byte]) for byte in range(256)]
    length = 2
    while len(tokens) < base:
        for letters in product(letters_in_order, repeat=length):
            tokens.append(bytes(letters))
            if len(tokens) == base:
                break
        length += 1
    return {token: rank for rank, token in enumerate(tokens)}


def write_synthetic_vocabulary(directory: Path, vocab_size: int, *, seed: int = 0) -> None:
    """Write `tiktoken.model` and `tokenizer_config.json` for `vocab_size` tokens, 256 special slots included.

    Raises:
        TokenizerError: vocab_size is below 512 (256 bytes and 256 special slots).
    """
    base = vocab_size - NUM_SPECIAL_SLOTS
    ranks = synthetic_ranks(base, seed=seed)
    text = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    replace_file(directory / VOCABULARY_NAME, text)
    added = {str(token): {"content": name, "special": True} for name, token in special_tokens(base).items()}
    config = {
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": UNK,
        "pad_token": PAD,
        "tokenizer_class": "TikTokenTokenizer",
        "model_max_length": 1_000_000,
    }
    write_json(directory / CONFIG_NAME, config)


RECIPE_NAME = "synthetic.partial.json"


def shard_plan(config: KimiK2Config) -> list[list[TensorSpec]]:
    """The tensors by file, as published checkpoints have them: a layer a file, the rest at both ends, a tower last."""
    groups: list[list[TensorSpec]] = [[] for _ in range(config.num_hidden_layers)]
    tower: list[TensorSpec] = []
    for spec in all_tensors(config):
        match = LAYER.match(spec.name)
        layer = int(match[1]) if match else (0 if "embed_tokens" in spec.name else -1)
        (tower if VISION.match(spec.name) else groups[layer]).append(spec)
    return [*groups, tower] if tower else groups


def write_synthetic_checkpoint(
    directory: str | Path,
    config: KimiK2Config,
    *,
    seed: int = 0,
    on_tensor: Callable[[TensorSpec], None] | None = None,
) -> int:
    """Write a whole checkpoint: shards, index, config.json, generation_config.json and the tokenizer files.

    An interrupted run leaves finished shards; a rerun with the same arguments rewrites only the others.

    Args:
        directory: created if missing.
        config: decides format (`config.quantization`) and names (`config.tensor_prefix`); see `with_format`.
        seed: of the weights; the same seed gives the same bytes.
        on_tensor: called after each tensor, for a progress bar.

    Returns:
        Bytes of tensor data.

    Raises:
        ConfigError: the directory holds another checkpoint.
        TokenizerError: the vocabulary is too small for 256 bytes and 256 special slots.
        CheckpointError: the disk is full, or another process writes there.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot be made: {error.strerror}", file=directory) from None
    with DirectoryLock(directory):
        return _write(directory, config, seed, on_tensor)


def _write(directory: Path, config: KimiK2Config, seed: int, on_tensor: Callable[[TensorSpec], None] | None) -> int:
    recipe = {"seed": seed, "config": hf_config(config)}
    _claim(directory, recipe)
    write_synthetic_vocabulary(directory, config.vocab_size)
    write_chat_template(directory, ChatStyle(config.chat_style or ChatStyle.INSTRUCT))
    if config.vision is not None:
        write_json(directory / IMAGE_FILE, {"media_proc_cfg": MediaConfig().to_published_dict()})
    weights = SyntheticWeights(config, seed)
    plan = shard_plan(config)
    weight_map: dict[str, str] = {}
    total = 0
    for number, group in enumerate(plan, start=1):
        name = f"model-{number}-of-{len(plan)}.safetensors"
        stored = [TensorSpec(stored_name(config, spec.name), spec.dtype, spec.shape) for spec in group]
        weight_map.update((spec.name, name) for spec in stored)
        total += sum(spec.nbytes for spec in stored)
        finished = (directory / name).exists()
        if not finished:
            with SafetensorsFile(directory / name, FileLayout.of(stored)) as writer:
                for spec, renamed in zip(group, stored, strict=True):
                    writer.append(renamed.name, [tensor_bytes(weights.tensor(spec))])
                    if on_tensor:
                        on_tensor(spec)
        elif on_tensor:
            for spec in group:
                on_tensor(spec)
    write_json(directory / "config.json", recipe["config"])
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.vocab_size - NUM_SPECIAL_SLOTS + IM_END}
    write_json(directory / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    write_index(directory, weight_map, total)
    (directory / RECIPE_NAME).unlink()
    return total


def _claim(directory: Path, recipe: Json) -> None:
    """Refuse to mix two checkpoints in one directory; allow resuming the same one."""
    path = directory / RECIPE_NAME
    if path.exists():
        if read_data(path, ConfigError) != recipe:
            raise ConfigError("an unfinished checkpoint with other arguments lies here", file=path)
    elif any(directory.glob("*.safetensors")):
        raise ConfigError("holds a checkpoint already; give an empty directory", file=directory)
    elif other := next((entry.name for entry in directory.iterdir() if entry.name != LOCK), None):
        raise ConfigError(f"holds {other!r}; give an empty directory", file=directory)
    write_json(path, recipe)
