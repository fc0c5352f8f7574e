"""Tower and projector: from pixels to rows of the language model's embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from kimi_k2.checkpoint.index import open_tensors
from kimi_k2.checkpoint.names import VISION
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, MissingShardError, MissingTensorError, TensorShapeError
from kimi_k2.model.vision.tower import Affine, LayerNorm, VisionTower
from kimi_k2.vision_config import Grid, VisionConfig


class Projector(nn.Module):
    """LayerNorm of each patch, then two Linears with an exact GELU between, over the patches side by side."""

    def __init__(self, config: VisionConfig, text_hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        merged = config.merged_size
        self.pre_norm = LayerNorm(config.hidden_size, config.projection_layer_norm_eps, dtype=dtype)
        # Names proj.0 and proj.2 are the checkpoint's.
        self.proj = nn.Sequential(
            Affine(merged, merged, dtype=dtype), nn.GELU(), Affine(merged, text_hidden_size, dtype=dtype)
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

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        on_tensor: Callable[[str, int], None] | None = None,
    ) -> VisionModel:
        """Read the tower of a checkpoint; the language model's tensors are not touched.

        Args:
            on_tensor: called with (name, bytes) after each tensor, for a progress bar.

        Raises:
            ConfigError: config.json is missing or invalid, or has no tower.
            CheckpointError: (subclasses) a shard or tensor is missing, damaged or of the wrong shape or dtype.
        """
        config = KimiK2Config.from_pretrained(directory)
        with CheckpointReader.for_config(directory, config, vision=True) as reader:
            with torch.device("meta"):
                model = cls(config, dtype=dtype)
            model = model.to_empty(device=device)
            targets = dict(model.named_parameters())
            for name, tensor in reader.stream(lambda name: VISION.match(name) is not None):
                targets[name].copy_(tensor)
                if on_tensor:
                    on_tensor(name, tensor.nbytes)
        return model.eval()

    @classmethod
    def from_file(
        cls, path: str | Path, config: KimiK2Config, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> VisionModel:
        """Read the file that `kimi-k2 convert` wrote beside the ranks'.

        Raises:
            MissingShardError: it is not there or cannot be read.
            MissingTensorError, TensorShapeError: it is not this model's.
        """
        with torch.device("meta"):
            model = cls(config, dtype=dtype)
        model = model.to_empty(device=device)
        try:
            with open_tensors(Path(path)) as file:
                names = set(file.keys())
                for name, target in model.named_parameters():
                    if name not in names:
                        raise MissingTensorError("not in the file", file=path, tensor=name)
                    tensor = file.get_tensor(name)
                    if tensor.shape != target.shape:
                        expected, actual = list(target.shape), list(tensor.shape)
                        raise TensorShapeError(f"expected {expected}, got {actual}", file=path, tensor=name)
                    target.copy_(tensor)
        except (OSError, SafetensorError) as error:
            raise MissingShardError(f"cannot be read: {error}", file=path) from None
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
