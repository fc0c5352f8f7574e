"""Checkpoints as one file, changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

FILES = ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """All tensors by their stored names."""
    return {name: tensor for shard in directory.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def rewritten(
    source: Path,
    target: Path,
    tensors: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda held: held,
    config: Callable[[dict[str, Any]], object] = lambda raw: None,
) -> Path:
    """A copy of a checkpoint whose tensors and config.json these functions have changed."""
    target.mkdir()
    save_file(tensors(tensors_of(source)), target / "model.safetensors")
    raw = json.loads((source / "config.json").read_text())
    config(raw)
    (target / "config.json").write_text(json.dumps(raw))
    for name in FILES:
        if (source / name).exists():
            (target / name).write_bytes((source / name).read_bytes())
    return target
