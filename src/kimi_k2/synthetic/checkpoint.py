"""Synthetic checkpoints in the exact Hugging Face layout: real names, dtypes and shards, random weights.

A checkpoint of tens of gigabytes needs no more memory than its largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from kimi_k2.checkpoint.lock import LOCK, DirectoryLock
from kimi_k2.checkpoint.names import LAYER
from kimi_k2.checkpoint.vision_names import VISION, all_tensors, stored_name
from kimi_k2.checkpoint.writer import SafetensorsWriter, write_index, write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError
from kimi_k2.files import read_json
from kimi_k2.media.config import IMAGE_FILE, MediaConfig
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.synthetic.config import IM_END, hf_config
from kimi_k2.synthetic.vocabulary import write_synthetic_vocabulary
from kimi_k2.synthetic.weights import SyntheticWeights
from kimi_k2.tokenization.chat import write_chat_template
from kimi_k2.tokenization.special_tokens import NUM_SPECIAL_SLOTS
from kimi_k2.tokenization.style import ChatStyle

RECIPE_NAME = "synthetic.partial.json"


def shard_plan(config: KimiK2Config, shards: int | None = None) -> list[list[TensorSpec]]:
    """Spread the tensors over files as the published checkpoints do: a layer a file, the rest at both ends.

    A vision tower has a file of its own at the end.

    Args:
        config: of the model.
        shards: number of files; None for one a layer. Fewer merge neighbouring layers, more split by size.
    """
    specs = list(all_tensors(config))
    if shards is None or shards == config.num_hidden_layers:
        groups: list[list[TensorSpec]] = [[] for _ in range(config.num_hidden_layers)]
        tower: list[TensorSpec] = []
        for spec in specs:
            match = LAYER.match(spec.name)
            layer = int(match[1]) if match else (0 if "embed_tokens" in spec.name else -1)
            (tower if VISION.match(spec.name) else groups[layer]).append(spec)
        return [*groups, tower] if tower else groups
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
        CheckpointError: the disk is full, or another process writes there.
    """
    directory = Path(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot be made: {error.strerror}", file=directory) from None
    with DirectoryLock(directory):
        return _write(directory, config, seed, shards, on_tensor)


def _write(
    directory: Path, config: KimiK2Config, seed: int, shards: int | None, on_tensor: Callable[[TensorSpec], None] | None
) -> int:
    recipe = {"seed": seed, "shards": shards, "config": hf_config(config)}
    _claim(directory, recipe)
    write_synthetic_vocabulary(directory, config.vocab_size)
    write_chat_template(directory, ChatStyle(config.chat_style or ChatStyle.INSTRUCT))
    if config.vision is not None:
        write_json(directory / IMAGE_FILE, {"media_proc_cfg": MediaConfig().to_published_dict()})
    weights = SyntheticWeights(config, seed)
    plan = shard_plan(config, shards)
    weight_map: dict[str, str] = {}
    total = 0
    for number, group in enumerate(plan, start=1):
        name = f"model-{number}-of-{len(plan)}.safetensors"
        stored = [TensorSpec(stored_name(config, spec.name), spec.dtype, spec.shape) for spec in group]
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
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": config.vocab_size - NUM_SPECIAL_SLOTS + IM_END}
    write_json(directory / "generation_config.json", {k: v for k, v in generation.items() if v is not None})
    write_index(directory, weight_map, total)
    (directory / RECIPE_NAME).unlink()
    return total


def _claim(directory: Path, recipe: dict[str, Any]) -> None:
    """Refuse to mix two checkpoints in one directory; allow resuming the same one."""
    path = directory / RECIPE_NAME
    if path.exists():
        if read_json(path, ConfigError) != recipe:
            raise ConfigError("an unfinished checkpoint with other arguments lies here", file=path)
    elif any(directory.glob("*.safetensors")):
        raise ConfigError("holds a checkpoint already; give an empty directory", file=directory)
    elif other := next((entry.name for entry in directory.iterdir() if entry.name != LOCK), None):
        raise ConfigError(f"holds {other!r}; give an empty directory", file=directory)
    write_json(path, recipe)
