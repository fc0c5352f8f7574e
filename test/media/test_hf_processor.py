"""Our processor against transformers' `Kimi_K25Processor`: 50 drawn images, 5 videos; live, or as recorded.

transformers' needs torchvision, which does not load beside every build of torch. Where it loads every pixel is
compared; elsewhere 64 of each picture with recorded.json, which `PYTHONPATH=src:test/media python
test/media/test_hf_processor.py` writes in an environment that has it: torch 2.9.1, torchvision 0.24.1, transformers
5.23.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import VIDEOS, chunks_of_frames, drawn, image_of, sizes, write_video
from torch import Tensor

from kimi_k2.media.config import MediaConfig
from kimi_k2.media.image import process_image
from kimi_k2.media.patches import Media, normalised
from kimi_k2.media.prompt import MediaProcessor
from kimi_k2.media.video import process_video
from kimi_k2.synthetic.checkpoint import synthetic_ranks
from kimi_k2.tokenization.special_tokens import special_tokens
from kimi_k2.tokenization.tokenizer import KimiTokenizer
from kimi_k2.vision_config import VisionConfig

RECORDED = Path(__file__).with_name("recorded.json")
THEIRS = MediaConfig(rules="transformers")
STEP = 1 / 127.5  # of a byte, normalised
Made = dict[str, list[dict[str, Any]]]


def by_transformers() -> Made:
    """Grids, pixels and the text of a video's tokens.

    Raises:
        ImportError, RuntimeError: its processor does not load here.
    """
    import torchvision  # noqa: F401
    from transformers.models import kimi_k25
    from transformers.video_utils import VideoMetadata

    images = (kimi_k25.Kimi_K25ImageProcessor()(image_of(each), return_tensors="pt") for each in range(len(sizes())))
    found: Made = {
        "images": [{"grids": each["image_grid_thw"].tolist(), "pixels": each["pixel_values"]} for each in images],
        "videos": [],
    }
    shell = object.__new__(kimi_k25.Kimi_K25Processor)
    shell.video_processor, shell.video_token = (kimi_k25.Kimi_K25VideoProcessor(), "<|video|>")
    for frames, height, width, fps in VIDEOS:
        drawing = np.stack([drawn(height, width, seed) for seed in range(frames)])
        metadata = VideoMetadata(total_num_frames=frames, fps=float(fps), height=height, width=width)
        made: Any = shell.video_processor(
            [drawing], video_metadata=[metadata], return_metadata=True, input_data_format="channels_last"
        )
        grids = torch.as_tensor(made["video_grid_thw"])
        text = shell.replace_video_token({**made, "video_grid_thw": grids}, 0)
        short = re.sub(r"(?:<\|video\|>)+", lambda run: f"{{{len(run[0]) // len('<|video|>')}}}", text)
        pixels = torch.as_tensor(made["pixel_values_videos"])
        found["videos"].append({"grids": grids.tolist(), "pixels": pixels, "text": short})
    return found


def levels(pixels: Tensor) -> Tensor:
    """The bytes behind 64 of normalised pixels, drawn once for each size."""
    flat = pixels.flatten()
    return flat[np.random.default_rng(len(flat)).integers(0, len(flat), 64)] * 127.5 + 127.5


@pytest.fixture(scope="module")
def live() -> Made | None:
    try:
        return by_transformers()
    except (ImportError, RuntimeError):
        return None


def check(ours: list[Media], kind: str, number: int, live: Made | None) -> dict[str, Any]:
    """What was recorded; ours is within one rounding step of it, and most values are equal."""
    given = json.loads(RECORDED.read_text())[kind][number]
    pixels = normalised(torch.cat([each.patches for each in ours])).flatten()
    assert [list(each.grid) for each in ours] == given["grids"]
    difference = (levels(pixels) - torch.tensor(given["levels"])).abs()
    assert float(difference.max()) <= 1.01
    assert float(difference.mean()) <= 0.1
    if live is not None:
        made = live[kind][number]
        assert (made["grids"], levels(made["pixels"]).round().tolist()) == (given["grids"], given["levels"])
        assert float((pixels - made["pixels"].flatten()).abs().max()) <= STEP + 1e-6
        assert made.get("text") == given.get("text")
    return dict(given)


@pytest.mark.parametrize("number", range(len(sizes())))
def test_fifty_images(number: int, live: Made | None) -> None:
    check([process_image(image_of(number), THEIRS)], "images", number, live)


@pytest.mark.parametrize("number", range(len(VIDEOS)))
def test_five_videos(number: int, live: Made | None) -> None:
    frames, height, width, fps = VIDEOS[number]
    ours = chunks_of_frames([drawn(height, width, seed) for seed in range(frames)], fps, THEIRS)
    given = check(ours, "videos", number, live)
    text = re.sub(r"\{(\d+)\}", lambda run: "<|media_pad|>" * int(run[1]), given["text"])
    tokenizer = KimiTokenizer(synthetic_ranks(512), special_tokens(512))
    token = tokenizer.special_tokens["<|media_pad|>"]
    processor = MediaProcessor(tokenizer, VisionConfig(image_token_id=token), THEIRS)
    assert processor.video_tokens(ours, "Look: ") == tokenizer.encode("Look: " + text, allow_special=True)


@pytest.mark.parametrize(("number", "suffix"), enumerate((".mp4", ".avi", ".webm", ".mov", ".mkv")))
def test_files_of_videos_are_their_frames(tmp_path: Path, number: int, suffix: str) -> None:
    frames, height, width, fps = VIDEOS[number]
    drawing = np.stack([drawn(height, width, seed) for seed in range(frames)])
    codec = "libvpx-vp9" if suffix == ".webm" else "mpeg4"
    path = write_video(tmp_path / f"video{suffix}", drawing, fps, codec)
    import av

    with av.open(str(path)) as container:
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(decoded) == frames
    for found, wanted in zip(process_video(path, THEIRS), chunks_of_frames(decoded, fps, THEIRS), strict=True):
        assert (found.digest, found.seconds) == (wanted.digest, wanted.seconds)


if __name__ == "__main__":
    kinds = [
        [json.dumps({**one, "pixels": None, "levels": levels(one["pixels"]).round().int().tolist()}) for one in each]
        for each in by_transformers().values()
    ]
    first, second = (",\n".join(each) for each in kinds)
    RECORDED.write_text(f'{{"images": [\n{first}\n], "videos": [\n{second}\n]}}\n')
