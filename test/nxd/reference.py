"""transformers' model of a checkpoint, dequantized, and rounded as Neuron holds it, by arithmetic written out here."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kimi_k2.parity.reference import load_transformers_model


def of_blocks(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A scale for each value of a weight, of one a block, whose last may be partly empty, or one a row."""
    if scale.shape == (len(like), 1):
        return scale.float()
    return scale.float().repeat_interleave(128, 0)[: len(like)].repeat_interleave(128, 1)[:, : like.shape[1]]


def dequantized(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint in float32."""
    stored: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        stored |= load_file(file)
    found = {}
    for name, tensor in stored.items():
        module, _, suffix = name.rpartition(".")
        if suffix == "weight_packed":
            rows, columns = stored[f"{module}.weight_shape"].tolist()
            nibbles = torch.stack([(tensor >> shift) & 15 for shift in range(0, 32, 4)], dim=-1)
            values = nibbles.reshape(rows, -1)[:, :columns].float() - 8
            found[f"{module}.weight"] = values * stored[f"{module}.weight_scale"].float().repeat_interleave(32, 1)
        elif tensor.dtype == torch.float8_e4m3fn:
            scale = stored.get(f"{module}.weight_scale_inv", stored.get(f"{module}.weight_scale"))
            assert scale is not None
            found[name] = tensor.float() * of_blocks(scale, tensor)
        elif not suffix.startswith("weight_"):
            found[name] = tensor.float()
    return found


def rounded(weight: torch.Tensor, block: tuple[int, int], largest: float) -> torch.Tensor:
    """A weight in e4m3 with a scale a block, by which its greatest value is `largest`; 0 is a whole side."""
    rows, columns = (side or size for side, size in zip(block, weight.shape, strict=True))
    blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale: torch.Tensor = blocks.abs().amax(dim=(1, 3), keepdim=True) / largest
    out: torch.Tensor = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return out.reshape(weight.shape)


def reference(
    checkpoint: Path, block: tuple[int, int] | None = None, largest: float = 240.0, dtype: torch.dtype = torch.float32
) -> Any:
    """transformers' model of a checkpoint.

    Args:
        checkpoint: its directory.
        block: rows and columns of the blocks of gate and up (turned, of down) in which Neuron holds routed experts
            that the checkpoint has otherwise; without, they are as stored.
        largest: see `rounded`.
        dtype: of the model.
    """
    found = dequantized(checkpoint)
    for name, tensor in found.items():
        if block is not None and (match := re.search(r"\.mlp\.experts\.\d+\.(\w+)_proj", name)):
            turned = match[1] == "down" and all(block)
            found[name] = rounded(tensor, block[::-1] if turned else block, largest)
    config = json.loads((checkpoint / "config.json").read_text())
    config.pop("quantization_config", None)
    with tempfile.TemporaryDirectory() as directory:
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, Path(directory) / "model.safetensors")
        found.clear()
        (Path(directory) / "config.json").write_text(json.dumps(config))
        return load_transformers_model(directory, dtype)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """New tokens of transformers' model, and the logits [count, vocab] that chose them."""
    text, logits = [*prompt], []
    for _ in range(count):
        logits.append(model(torch.tensor([text])).logits[0, -1])
        text.append(int(logits[-1].argmax()))
    return text[len(prompt) :], torch.stack(logits)
