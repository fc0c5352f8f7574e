"""Our processor against what transformers' own made of the same pictures, recorded by record.py.

test_hf_processor.py compares every pixel, where torchvision loads; this holds 64 of each picture everywhere.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import VIDEOS, drawn, image_of, sizes
from record import RECORDED, positions

from kimi_k2.media.config import MediaConfig
from kimi_k2.media.image import process_image
from kimi_k2.media.patches import normalised
from kimi_k2.media.prompt import MediaProcessor
from kimi_k2.media.video import process_frames
from kimi_k2.synthetic.checkpoint import write_synthetic_vocabulary
from kimi_k2.tokenization.tokenizer import KimiTokenizer
from kimi_k2.vision_config import VisionConfig

THEIRS = MediaConfig(rules="transformers")
GIVEN: dict[str, Any] = json.loads(RECORDED.read_text())


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> MediaProcessor:
    directory: Path = tmp_path_factory.mktemp("vocabulary")
    write_synthetic_vocabulary(directory, 768)
    return MediaProcessor(KimiTokenizer.from_pretrained(directory), VisionConfig(image_token_id=533), THEIRS)


def check(patches: torch.Tensor, levels: list[int]) -> None:
    """Within one rounding step at the recorded positions, and most of them equal."""
    flat = normalised(patches).flatten() * 127.5 + 127.5
    difference = (flat[positions(len(flat))] - torch.tensor(levels, dtype=torch.float32)).abs()
    assert float(difference.max()) <= 1.01
    assert float(difference.mean()) <= 0.1


@pytest.mark.parametrize("number", range(len(sizes())))
def test_images(processor: MediaProcessor, number: int) -> None:
    ours, given = process_image(image_of(number), processor.config), GIVEN["images"][number]
    assert list(ours.grid) == given["grid"]
    check(ours.patches, given["levels"])


@pytest.mark.parametrize("number", range(len(VIDEOS)))
def test_videos(processor: MediaProcessor, number: int) -> None:
    frames, height, width, fps = VIDEOS[number]
    given = GIVEN["videos"][number]
    ours = process_frames([drawn(height, width, seed) for seed in range(frames)], fps, processor.config)
    assert [list(chunk.grid) for chunk in ours] == given["grids"]
    check(torch.cat([chunk.patches for chunk in ours]), given["levels"])
    text = re.sub(r"\{(\d+)\}", lambda run: "<|media_pad|>" * int(run[1]), given["text"])
    wanted = processor.tokenizer.encode("Look: " + text, allow_special=True)
    assert processor.video_tokens(ours, "Look: ") == wanted
