"""Pictures and videos drawn for the tests of media."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from kimi_k2.media.config import MediaConfig
from kimi_k2.media.patches import Media
from kimi_k2.media.video import chunked, sampled_indices

Frames = npt.NDArray[np.uint8]
MODES = ["RGB", "RGBA", "L", "LA", "P", "P+t", "CMYK", "1", "PA", "YCbCr"]


def drawn(height: int, width: int, seed: int) -> Frames:
    """Smooth colours with sharp edges: resizing either has something to lose."""
    generator = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    waves = generator.uniform(0.5, 9, (3, 2)) / max(height, width)
    planes = [np.sin(2 * np.pi * (a * x + b * y)) * 100 + 128 for a, b in waves]
    picture = np.stack(planes, axis=-1)
    top, left = generator.integers(0, height), generator.integers(0, width)
    picture[top:, left:] = generator.integers(0, 256, 3)
    picture += generator.normal(0, 10, picture.shape)
    return picture.clip(0, 255).astype(np.uint8)


def in_mode(pixels: Frames, mode: str, seed: int) -> Image.Image:
    image = Image.fromarray(pixels)
    if mode == "P+t":
        palette = image.convert("P")
        palette.info["transparency"] = int(np.random.default_rng(seed).integers(0, 200))
        return palette
    if mode in ("RGBA", "LA", "PA"):
        alpha = Image.fromarray(drawn(pixels.shape[0], pixels.shape[1], seed + 1)[..., 0])
        converted = image.convert("RGBA" if mode == "PA" else mode)
        converted.putalpha(alpha)
        return converted.convert("PA") if mode == "PA" else converted
    return image.convert(mode)


def write_video(path: Path, frames: Frames, fps: int, codec: str = "mpeg4", **options: Any) -> Path:
    """A file that PyAV encodes; skips the test where there is no PyAV."""
    av = pytest.importorskip("av", reason="videos need PyAV")
    with av.open(str(path), "w", **options) as container:
        stream = container.add_stream(codec, rate=fps)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "rgb8" if codec == "gif" else "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return path


def chunks_of_frames(frames: Sequence[Frames], fps: float, config: MediaConfig) -> list[Media]:
    """Of a video that is decoded already, as `process_video` makes them."""
    indices = sampled_indices(len(frames), fps, config)
    return chunked((Image.fromarray(frames[number]) for number in indices), indices, fps, config)
