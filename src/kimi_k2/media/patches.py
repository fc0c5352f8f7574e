"""From pixels to patches: the size that an image is brought to, its padding, and how its patches are laid out."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from kimi_k2.errors import MediaError
from kimi_k2.limits import MEDIA_TOKENS
from kimi_k2.media.config import MediaConfig
from kimi_k2.vision_config import Grid

Size = tuple[int, int]  # height, width


@dataclass(frozen=True, eq=False)
class Media:
    """One image, or one chunk of a video.

    Attributes:
        grid: of its patches.
        patches: uint8 [T, 3, patch, patch], frame by frame, row by row.
        seconds: when its first frame is shown, for a video; None for an image.
    """

    grid: Grid
    patches: Tensor
    seconds: float | None = None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what the tower sees: the grid and every pixel."""
        digest = hashlib.sha256(repr(tuple(self.grid)).encode())
        digest.update(self.patches.contiguous().numpy().data)
        return digest.hexdigest()


def normalised(patches: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bytes 0..255 to -1..1 (mean and deviation 0.5), computed in float32."""
    return ((patches.to(torch.float32) - 127.5) / 127.5).to(dtype)


def fitted(size: Size, max_patches: int, config: MediaConfig) -> tuple[Size, Size]:
    """The size that an image is resized to, never a larger one, and the size with padding.

    Both limits count whole patches of the image as it comes; sides are padded to whole tokens.

    Args:
        size: height and width in pixels, at least 1.
        max_patches: of the image.
    """
    height, width = size
    patch, longest = config.patch_size, config.max_side * config.patch_size
    count = max(1, height // patch) * max(1, width // patch)
    scale = min(1.0, math.sqrt(max_patches / count), longest / height, longest / width)
    inner = (min(max(1, int(height * scale)), longest), min(max(1, int(width * scale)), longest))
    token = config.merge_size * patch
    return inner, (-(-inner[0] // token) * token, -(-inner[1] // token) * token)


def check_tokens(size: Size, max_patches: int, config: MediaConfig, name: str | None, chunks: int = 1) -> None:
    """Refuse an image, or a video of so many chunks, that needs too many tokens.

    Raises:
        MediaError: it does; `name` is its file.
    """
    _, (height, width) = fitted(size, max_patches, config)
    side = config.patch_size * config.merge_size
    tokens = (height // side) * (width // side) * chunks
    if tokens > MEDIA_TOKENS:
        raise MediaError(f"needs {tokens} tokens; at most {MEDIA_TOKENS} are taken", file=name)


def to_patches(image: Image.Image, max_patches: int, config: MediaConfig) -> tuple[Grid, Tensor]:
    """Resize by Pillow (bicubic, antialiased), pad with black below and on the right, and cut.

    Args:
        image: RGB.

    Returns:
        Its grid and uint8 [height * width, 3, patch, patch].
    """
    inner, outer = fitted((image.height, image.width), max_patches, config)
    canvas: npt.NDArray[np.uint8] = np.zeros((*outer, 3), dtype=np.uint8)
    canvas[: inner[0], : inner[1]] = np.asarray(image.resize(inner[::-1], Image.Resampling.BICUBIC))
    patch = config.patch_size
    rows, columns = outer[0] // patch, outer[1] // patch
    cut = canvas.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return Grid(1, rows, columns), torch.from_numpy(np.ascontiguousarray(cut).reshape(-1, 3, patch, patch))
