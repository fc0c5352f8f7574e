"""Our processor against transformers' `Kimi_K25Processor`: 50 drawn images, 5 videos.

transformers' needs torchvision, which loads beside torch 2.9.1 but not beside every build of torch. So this file runs
in an environment of its own where need be: torch 2.9.1, torchvision 0.24.1, transformers 5.23, and this package's
`src` on PYTHONPATH.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import VIDEOS, drawn, image_of, sizes, write_video

from kimi_k2.media.config import MediaConfig
from kimi_k2.media.image import process_image
from kimi_k2.media.patches import normalised
from kimi_k2.media.prompt import MediaProcessor
from kimi_k2.media.video import process_video
from kimi_k2.synthetic.checkpoint import write_synthetic_vocabulary
from kimi_k2.tokenization.tokenizer import KimiTokenizer
from kimi_k2.vision_config import VisionConfig

# One step of a byte, normalised.
STEP = 1 / 127.5


THEIRS = MediaConfig(rules="transformers")


def hugging_face() -> Any:
    try:
        import torchvision  # noqa: F401
        from transformers.models import kimi_k25
        from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor  # noqa: F401
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"transformers' processor needs torchvision and transformers 5.23: {error}")
    return kimi_k25


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> MediaProcessor:
    directory = tmp_path_factory.mktemp("vocabulary")
    write_synthetic_vocabulary(directory, 768)
    return MediaProcessor(KimiTokenizer.from_pretrained(directory), VisionConfig(image_token_id=533), THEIRS)


def expected_ids(tokenizer: KimiTokenizer, text: str, video_token: str) -> list[int]:
    return tokenizer.encode(text.replace(video_token, "<|media_pad|>"), allow_special=True)


def test_fifty_images(processor: MediaProcessor) -> None:
    kimi_k25 = hugging_face()
    theirs = kimi_k25.Kimi_K25ImageProcessor()
    shell = object.__new__(kimi_k25.Kimi_K25Processor)
    shell.image_processor, shell.image_token = theirs, "<|media_pad|>"
    worst, changed, values = 0.0, 0, 0
    for number, (height, width) in enumerate(sizes()):
        image = image_of(number)
        expected = theirs(image, return_tensors="pt")
        ours = process_image(image, processor.config)
        assert [list(ours.grid)] == expected["image_grid_thw"].tolist(), (height, width, image.mode)
        difference = (normalised(ours.patches) - expected["pixel_values"]).abs()
        worst = max(worst, float(difference.max()))
        changed, values = changed + int((difference > 1e-6).sum()), values + difference.numel()
        assert worst <= STEP + 1e-6, (height, width, image.mode)
        text = shell.replace_image_token(expected, 0)
        assert processor.image_tokens(ours) == expected_ids(processor.tokenizer, text, "-")
    print(f"\n50 images: largest difference {worst * 127.5:.3f} steps, {changed} of {values} values differ")


@pytest.mark.parametrize(
    ("frames", "height", "width", "fps", "codec", "suffix"),
    [
        (*video, "libvpx-vp9" if suffix == ".webm" else "mpeg4", suffix)
        for video, suffix in zip(VIDEOS, (".mp4", ".avi", ".webm", ".mov", ".mkv"), strict=True)
    ],
)
def test_five_videos(
    processor: MediaProcessor, tmp_path: Path,
    frames: int, height: int, width: int, fps: int, codec: str, suffix: str,
) -> None:  # fmt: skip
    kimi_k25 = hugging_face()
    import av
    from transformers.video_utils import VideoMetadata

    drawing = np.stack([drawn(height, width, seed) for seed in range(frames)])
    path = write_video(tmp_path / f"video{suffix}", drawing, fps, codec)
    with av.open(str(path)) as container:
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
    assert len(decoded) == frames
    theirs = kimi_k25.Kimi_K25VideoProcessor()
    metadata = VideoMetadata(total_num_frames=frames, fps=float(fps), height=height, width=width)
    expected = theirs([decoded], video_metadata=[metadata], return_metadata=True, input_data_format="channels_last")
    ours = process_video(path, processor.config)
    grids = torch.as_tensor(expected["video_grid_thw"])
    assert [list(chunk.grid) for chunk in ours] == grids.tolist()
    pixels = torch.as_tensor(expected["pixel_values_videos"])
    difference = (normalised(torch.cat([chunk.patches for chunk in ours])) - pixels).abs().max()
    assert float(difference) <= STEP + 1e-6
    shell = object.__new__(kimi_k25.Kimi_K25Processor)
    shell.video_processor, shell.video_token = theirs, "<|video|>"
    inputs = {**expected, "video_grid_thw": grids}
    text = "Look: " + shell.replace_video_token(inputs, 0)
    assert processor.video_tokens(ours, "Look: ") == expected_ids(processor.tokenizer, text, "<|video|>")


def test_limits_are_transformers_own() -> None:
    kimi_k25 = hugging_face()
    image, video, ours = kimi_k25.Kimi_K25ImageProcessor(), kimi_k25.Kimi_K25VideoProcessor(), MediaConfig()
    assert (ours.max_patches, ours.max_side) == (image.max_patches, image.size["max_height"])
    assert (ours.max_patches_a_frame, ours.sample_fps) == (video.max_patches, video.fps)
    assert (ours.patch_size, ours.merge_size, ours.frames_a_chunk) == (
        image.patch_size, image.merge_size, video.temporal_patch_size
    )  # fmt: skip
