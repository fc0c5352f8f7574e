"""Our processor beside vLLM's of K2.5, which has the rules published with the model: drawn images and videos.

Where vLLM is installed every pixel is compared; everywhere 64 of each picture with recorded.json, which
`PYTHONPATH=src:test/media python test/media/test_processor.py` writes by vLLM 0.32. KIMI_K2_DRAWS draws more of them.
"""

from __future__ import annotations

import json
import os
import random
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import MODES, Frames, chunks_of_frames, drawn, in_mode, write_video
from PIL import Image
from torch import Tensor

from kimi_k2.media.config import MediaConfig
from kimi_k2.media.image import process_image
from kimi_k2.media.patches import Media, normalised
from kimi_k2.media.prompt import timestamp
from kimi_k2.media.video import process_video

RECORDED = Path(__file__).with_name("recorded.json")
DRAWN = int(os.environ.get("KIMI_K2_DRAWS", "0"))
# Heights and widths from one pixel to beyond every limit; then drawn ones.
SIZES = [(1, 1), (28, 28), (27, 29), (448, 448), (1, 9000), (9000, 3), (2000, 2300), (1792, 1792), (14, 14)]
# Frames and frames a second of which other rules take others; then drawn ones.
LENGTHS = [(24, 25.0), (120, 24.0), (7, 29.97), (1, 25.0), (9, 3.0)]
IMAGES, VIDEOS = max(50, DRAWN), max(12, DRAWN)
RATES = (0.5, 1, 2, 3, 12.5, 23.976, 24, 25, 29.97, 60)


def limits(draw: random.Random) -> MediaConfig:
    """The published ones, or smaller ones, which more of the drawn sizes exceed."""
    if draw.random() < 0.3:
        return MediaConfig()
    images, frames = (int(2 ** draw.uniform(3, 11)) for _ in range(2))
    return MediaConfig(max_patches=images, max_patches_a_frame=frames, max_side=2 * draw.randint(2, 40))


def image_of(seed: int) -> tuple[Image.Image, MediaConfig]:
    draw = random.Random(seed)
    height, width = SIZES[seed] if seed < len(SIZES) else [int(2 ** draw.uniform(0, 10.5)) for _ in range(2)]
    return in_mode(drawn(height, width, seed), MODES[seed % len(MODES)], seed), limits(draw)


def video_of(seed: int) -> tuple[list[Frames], float, MediaConfig]:
    draw = random.Random(seed)
    length = draw.randint(1, 250), draw.choice([*RATES, draw.uniform(0.3, 120)])
    total, fps = LENGTHS[seed] if seed < len(LENGTHS) else length
    height, width = (int(2 ** draw.uniform(2, 7 if seed % 8 else 10.2)) for _ in range(2))
    still = drawn(height, width, seed)
    return [np.roll(still, number, axis=1) ^ np.uint8(number) for number in range(total)], fps, limits(draw)


def sampled(total: int, fps: float) -> list[list[int]]:
    """Frames of each chunk, by `split_video_chunks` of the published kimi_k25_vision_processing.py."""
    count = max(round(total * min(2.0, fps) / fps), 1)
    numbers: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
    return [numbers[start : start + 4] for start in range(0, count, 4)]


def by_vllm(kind: str, media: list[Any], config: MediaConfig) -> tuple[list[list[int]], Tensor]:
    """Grids and normalised pixels; ImportError without vLLM."""
    from vllm.transformers_utils.processors.kimi_k25_vision_fused import KimiK25FusedVisionProcessor

    processor = KimiK25FusedVisionProcessor(config.to_published_dict())
    found = [processor.preprocess([{"type": kind, kind: medium}]) for medium in media]
    return [each["grid_thws"][0].tolist() for each in found], torch.cat([each["pixel_values"] for each in found])


def levels(pixels: Tensor) -> list[int]:
    """The bytes behind 64 of normalised pixels, drawn once for each size."""
    flat = pixels.flatten()
    chosen = flat[np.random.default_rng(len(flat)).integers(0, len(flat), 64)]
    return (chosen * 127.5 + 127.5).round().int().tolist()


def check(ours: list[Media], number: int, kind: str, media: list[Any], config: MediaConfig) -> None:
    recorded = json.loads(RECORDED.read_text())[kind]
    grids, pixels = [list(each.grid) for each in ours], normalised(torch.cat([each.patches for each in ours]))
    try:
        theirs = by_vllm(kind, media, config)
    except ImportError:
        if number >= len(recorded):
            pytest.skip("not recorded, and vLLM is not installed")
    else:
        assert grids == theirs[0]
        assert float((pixels - theirs[1]).abs().max()) < 1e-6
    assert number >= len(recorded) or [grids, levels(pixels)] == recorded[number]


@pytest.mark.parametrize("seed", range(IMAGES))
def test_drawn_images(seed: int) -> None:
    image, config = image_of(seed)
    check([process_image(image, config)], seed, "image", [image], config)


def chunks_of(frames: list[Frames], fps: float) -> list[list[Image.Image]]:
    return [[Image.fromarray(frames[number]) for number in numbers] for numbers in sampled(len(frames), fps)]


@pytest.mark.parametrize("seed", range(VIDEOS))
def test_drawn_videos(seed: int) -> None:
    frames, fps, config = video_of(seed)
    ours = chunks_of_frames(frames, fps, config)
    check(ours, seed, "video_chunk", chunks_of(frames, fps), config)
    assert [chunk.seconds for chunk in ours] == [numbers[0] / fps for numbers in sampled(len(frames), fps)]
    for start in (*(chunk.seconds or 0.0 for chunk in ours), 90061.9996):  # beyond a day
        said = datetime.fromtimestamp(start, tz=UTC).strftime("%H:%M:%S") + f".{int(start % 1 * 1000):03d}"
        assert timestamp(start) == said


@pytest.mark.parametrize(
    ("suffix", "matrix", "turns"),
    [
        *((suffix, (), 0) for suffix in (".mp4", ".avi", ".webm", ".mov", ".mkv")),
        (".mp4", (0, 1, 0, -1, 0), -1), (".mov", (0, -1, 0, 1, 0), 1),
    ],
)  # fmt: skip
def test_files_of_videos_are_their_frames(tmp_path: Path, suffix: str, matrix: tuple[int, ...], turns: int) -> None:
    """As a phone marks how it was held: a, b, u, c, d of a track's matrix (ISO 14496-12); quarters counterclockwise."""
    frames = np.stack([drawn(120, 88, seed) for seed in range(30)])
    path = write_video(tmp_path / f"video{suffix}", frames, 25, "libvpx-vp9" if suffix == ".webm" else "mpeg4")
    data = path.read_bytes()
    held = data.find(b"tkhd") + 44  # in 16.16, behind the version and 36 bytes
    path.write_bytes(
        data[:held]
        + struct.pack(f">{len(matrix)}i", *(65536 * value for value in matrix))
        + data[held + 4 * len(matrix) :]
    )
    import av

    with av.open(str(path)) as container:
        decoded = [np.rot90(frame.to_ndarray(format="rgb24"), turns) for frame in container.decode(video=0)]
    assert len(decoded) == 30
    config = MediaConfig()
    for found, wanted in zip(process_video(path, config), chunks_of_frames(decoded, 25, config), strict=True):
        assert (found.digest, found.seconds) == (wanted.digest, wanted.seconds)


if __name__ == "__main__":
    images = [("image", [image], config) for image, config in map(image_of, range(50))]
    videos = [("video_chunk", chunks_of(frames, fps), config) for frames, fps, config in map(video_of, range(12))]
    record: dict[str, list[str]] = {"image": [], "video_chunk": []}
    for kind, media, config in images + videos:
        grids, pixels = by_vllm(kind, media, config)
        record[kind].append(json.dumps([grids, levels(pixels)]))
    lines = (f'"{kind}": [\n' + ",\n".join(rows) + "\n]" for kind, rows in record.items())
    RECORDED.write_text("{" + ",\n".join(lines) + "}\n")
