"""Tower and projector: from pixels to rows of the language model's embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.model.vision.tower import VisionTower
from kimi_k2.vision_config import Grid, VisionConfig


class Projector(nn.Module):
    """LayerNorm of each patch, then two Linears with an exact GELU between, over the patches side by side."""

    def __init__(self, config: VisionConfig, text_hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        merged = config.merged_size
        self.pre_norm = nn.LayerNorm(config.hidden_size, config.projection_layer_norm_eps, dtype=dtype)
        # Names proj.0 and proj.2 are the checkpoint's.
        self.proj = nn.Sequential(
            nn.Linear(merged, merged, dtype=dtype), nn.GELU(), nn.Linear(merged, text_hidden_size, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, merge, D] to [tokens, text_hidden_size]."""
        out: Tensor = self.proj(self.pre_norm(x).flatten(1))
        return out


class VisionModel(nn.Module):
    """Tower and projector of a member that has them; names of parameters are the checkpoint's.

    Raises:
        ConfigError: the configuration has no `vision_config`.
    """

    def __init__(self, config: KimiK2Config, *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if config.vision is None:
            raise ConfigError("missing: this member of the family takes no images", field="vision_config")
        self.config, self.dtype, self.text_hidden_size = config.vision, dtype, config.hidden_size
        self.vision_tower = VisionTower(config.vision, dtype=dtype)
        self.mm_projector = Projector(config.vision, config.hidden_size, dtype=dtype)
        self.requires_grad_(False)

    @classmethod
    def from_pretrained(
        cls, directory: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> VisionModel:
        """Read the tower of a checkpoint; the language model's tensors are not touched.

        Raises:
            ConfigError: config.json is missing or invalid, or has no tower.
            CheckpointError: (subclasses) a shard or tensor is missing, damaged or of the wrong shape or dtype.
        """
        config = KimiK2Config.from_pretrained(directory)
        with CheckpointReader.for_config(directory, config, vision=True) as reader:
            return cls.loaded(config, reader.get, dtype=dtype, device=device)

    @classmethod
    def loaded(
        cls, config: KimiK2Config, read: Callable[[str], Tensor], *, dtype: torch.dtype, device: torch.device | str
    ) -> VisionModel:
        """With what `read` gives by the checkpoint's names, whose shapes are known to be right.

        Raises:
            ConfigError: see the class.
        """
        with torch.device("meta"):
            model = cls(config, dtype=dtype)
        model = model.to_empty(device=device)
        for name, target in model.named_parameters():
            target.copy_(read(name))
        return model.eval()

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self.mm_projector.pre_norm.weight.device

    @torch.inference_mode()
    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Embeddings of images and video chunks, one after another: [tokens of all grids, text_hidden_size].

        Arguments and errors as for `VisionTower.forward`.
        """
        out: Tensor = self.mm_projector(self.vision_tower(pixels, grids))
        return out
