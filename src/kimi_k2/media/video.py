"""Video files, read by PyAV within bounds: frames sampled evenly, each brought to its patches as it is decoded."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from kimi_k2.errors import MediaError
from kimi_k2.limits import FRAME_PIXELS, VIDEO_FRAMES, VIDEO_PIXELS
from kimi_k2.media.config import MediaConfig
from kimi_k2.media.image import read_bounded
from kimi_k2.media.patches import Media, check_tokens, to_patches
from kimi_k2.vision_config import Grid

# No protocol: a container in memory cannot make FFmpeg open anything else. By its own guess FFmpeg would also take
# playlists and scripts, which open other files and addresses.
_BOUNDS = {
    "protocol_whitelist": "",
    "enable_drefs": "0",
    "format_whitelist": "mov,matroska,avi,gif,flv,mpegts",
}


def process_video(source: Path | bytes, config: MediaConfig, *, name: str | None = None) -> list[Media]:
    """A video's chunks.

    Raises:
        MediaError: PyAV is not installed; or the file cannot be read, is damaged, truncated, too large or too long,
            changes its size, has no frames, or is of a kind that is not read.
    """
    try:
        import av
    except ImportError:
        raise MediaError("videos need PyAV: pip install 'kimi-k2[video]'", file=name) from None
    name = name or (str(source) if isinstance(source, Path) else None)
    data = read_bounded(source) if isinstance(source, Path) else source
    try:
        total, fps = _counted(av, data, name)
        indices = sampled_indices(total, fps, config)
        return chunked(_decoded(av, data, indices, name), indices, fps, config, name)
    except MediaError:
        raise
    except (av.FFmpegError, ValueError, OSError, MemoryError, OverflowError, EOFError) as error:
        raise MediaError(f"damaged: {error}", file=name) from None


def chunked(
    pictures: Iterable[Image.Image],
    indices: Sequence[int],
    fps: float,
    config: MediaConfig,
    name: str | None = None,
) -> list[Media]:
    """A video's chunks.

    Args:
        pictures: the frames that are taken, RGB.
        indices: their numbers.
        fps: frames a second.

    Raises:
        MediaError: too many tokens, frames of several sizes, or fewer than expected.
    """
    frames: list[tuple[Grid, Tensor]] = []
    for picture in pictures:
        if not frames:
            chunk_count = -(-len(indices) // config.frames_a_chunk)
            check_tokens((picture.height, picture.width), config.max_patches_a_frame, config, name, chunk_count)
            first = picture.size
        if picture.size != first:
            raise MediaError(f"changes its size from {first} to {picture.size}", file=name)
        frames.append(to_patches(picture, config.max_patches_a_frame, config))
    if len(frames) < len(indices):
        raise MediaError(f"ends before frame {indices[len(frames)]}: truncated or damaged", file=name)
    chunks = []
    for start in range(0, len(frames), config.frames_a_chunk):
        grids, patches = zip(*frames[start : start + config.frames_a_chunk], strict=True)
        chunks.append(Media(grids[0]._replace(frames=len(grids)), torch.cat(patches), indices[start] / fps))
    return chunks


def sampled_indices(total: int, fps: float, config: MediaConfig) -> list[int]:
    """Frames that are taken of `total`: evenly, `sample_fps` a second, at least one and never one twice.

    By the rule of `split_video_chunks`, published with the model, they reach from the first frame to the last.
    """
    count = max(1, round(total * min(config.sample_fps, fps) / fps))
    indices: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return indices


def _open(av: Any, data: bytes, name: str | None) -> Any:
    try:
        container = av.open(io.BytesIO(data), options=_BOUNDS)
    except av.FFmpegError as error:
        kinds = "MP4, MOV, WebM, Matroska, AVI, GIF, FLV, MPEG-TS"
        raise MediaError(f"damaged, or no video of a kind that is read ({kinds}): {error}", file=name) from None
    if not container.streams.video:
        raise MediaError("has no video stream", file=name)
    return container


def _counted(av: Any, data: bytes, name: str | None) -> tuple[int, float]:
    """Number of frames and frames a second, without decoding."""
    with _open(av, data, name) as container:
        stream = container.streams.video[0]
        rate = stream.average_rate or stream.guessed_rate
        if not rate or not 0 < float(rate) <= 1000:
            raise MediaError(f"expected a rate of 0 to 1000 frames a second, got {rate}", file=name)
        size = stream.codec_context.width * stream.codec_context.height
        if not 0 < size <= FRAME_PIXELS:
            raise MediaError(f"expected frames of 1 to {FRAME_PIXELS} pixels, got {size}", file=name)
        total = stream.frames
        if total <= 0:  # Matroska and transport streams do not say
            total = sum(packet.size > 0 for packet in islice(container.demux(stream), 2 * VIDEO_FRAMES))
        if not 0 < total <= VIDEO_FRAMES or total * size > VIDEO_PIXELS:
            raise MediaError(f"expected 1 to {min(VIDEO_FRAMES, VIDEO_PIXELS // size)} frames, got {total}", file=name)
        return total, float(rate)


def _decoded(av: Any, data: bytes, indices: Sequence[int], name: str | None) -> Iterator[Image.Image]:
    """The frames of these ascending indices, upright, as RGB."""
    wanted, last = set(indices), indices[-1]
    with _open(av, data, name) as container:
        stream = container.streams.video[0]
        # One thread: same frames, and no lock of FFmpeg's workers against Python's.
        stream.codec_context.thread_count = 1
        for number, frame in enumerate(container.decode(stream)):
            if frame.width * frame.height > FRAME_PIXELS:
                raise MediaError(f"a frame of {frame.width} x {frame.height} pixels", file=name)
            if number in wanted:
                picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
                yield picture.rotate(frame.rotation, expand=True) if frame.rotation else picture
            if number >= last:
                return
