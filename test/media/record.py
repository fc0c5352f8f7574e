"""Writes recorded.json: what transformers' processor makes of the drawn pictures, for machines without torchvision.

Run where test_hf_processor.py runs: PYTHONPATH=src:test/media python test/media/record.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pictures import VIDEOS, drawn, image_of, sizes
from test_hf_processor import hugging_face

RECORDED = Path(__file__).with_name("recorded.json")
VALUES = 64


def positions(size: int) -> list[int]:
    """Which values of so many are recorded: drawn once for each size."""
    drawn_places: list[int] = np.random.default_rng(size).integers(0, size, VALUES).tolist()
    return drawn_places


def levels(pixels: torch.Tensor) -> list[int]:
    """The bytes behind normalised pixels, at the recorded positions."""
    flat = pixels.flatten()
    return [round(float(flat[place]) * 127.5 + 127.5) for place in positions(flat.numel())]


def main() -> None:
    kimi_k25 = hugging_face()
    from transformers.video_utils import VideoMetadata

    images, videos = [], []
    for number in range(len(sizes())):
        found = kimi_k25.Kimi_K25ImageProcessor()(image_of(number), return_tensors="pt")
        images.append({"grid": found["image_grid_thw"][0].tolist(), "levels": levels(found["pixel_values"])})
    shell = object.__new__(kimi_k25.Kimi_K25Processor)
    shell.video_processor, shell.video_token = kimi_k25.Kimi_K25VideoProcessor(), "<|video|>"
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
        videos.append({"grids": grids.tolist(), "levels": levels(pixels), "text": short})
    first, second = (",\n".join(json.dumps(one) for one in part) for part in (images, videos))
    RECORDED.write_text(f'{{"images": [\n{first}\n], "videos": [\n{second}\n]}}\n')


if __name__ == "__main__":
    main()
