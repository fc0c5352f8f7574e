"""Image processor that a checkpoint brings along for vLLM up to 0.24, as published ones do: our own processing.

Copied into the checkpoint; in preprocessor_config.json `auto_map` names it, `media_config` has MediaConfig's fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import BaseImageProcessor, BatchFeature

from kimi_k2.media.config import MediaConfig
from kimi_k2.media.image import process_image
from kimi_k2.media.patches import Media, chunks_of, normalised, to_patches


class MediaCode(BaseImageProcessor):  # type: ignore[misc]  # transformers has no types for mypy here
    """What vLLM's K2.5 asks of it: pixels and grids of images and video chunks, and how many tokens each takes."""

    def __init__(self, media_config: Mapping[str, Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.media_config = dict(media_config or {})
        self.num_frames_per_chunk = self._config().frames_a_chunk

    def _config(self) -> MediaConfig:
        return MediaConfig(**self.media_config)

    def _media(self, chunk: Mapping[str, Any]) -> Media:
        config = self._config()
        if chunk["type"] == "image":
            return process_image(chunk["image"], config)
        limit = config.max_patches_a_frame
        frames = [(0.0, *to_patches(frame.convert("RGB"), limit, config)) for frame in chunk["video_chunk"]]
        return chunks_of(frames, config)[0]

    def media_tokens_calculator(self, chunk: Mapping[str, Any]) -> int:
        """Tokens of one image or chunk."""
        return self._media(chunk).grid.tokens()

    def preprocess(self, chunks: Sequence[Mapping[str, Any]], **_: Any) -> BatchFeature:
        """float32 [patches, 3, patch, patch] of all, and int64 [media, 3]."""
        media = [self._media(chunk) for chunk in chunks]
        pixels = normalised(torch.cat([one.patches for one in media]))
        return BatchFeature({"pixel_values": pixels, "grid_thws": torch.tensor([tuple(one.grid) for one in media])})
