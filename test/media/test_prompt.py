"""Prompts with images and videos, and the images that are not plain RGB."""

from __future__ import annotations

import base64
import io
import json
import math
import os
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from pictures import MODES, chunks_of_frames, drawn, in_mode, write_video
from PIL import Image

from kimi_k2.errors import ConfigError, MediaError, TokenizerError
from kimi_k2.media.config import MediaConfig
from kimi_k2.media.image import open_image, process_image, to_rgb
from kimi_k2.media.patches import normalised
from kimi_k2.media.prompt import MediaProcessor, timestamp
from kimi_k2.tokenization.tokenizer import KimiTokenizer

# KIMI_K2_DRAWS=50 draws more images and videos.
DRAWN = int(os.environ.get("KIMI_K2_DRAWS", "8"))


@pytest.fixture(scope="module")
def processor(checkpoints: dict[str, Path]) -> MediaProcessor:
    return MediaProcessor.from_pretrained(checkpoints["k2.5"])


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures") / "a.png"
    Image.fromarray(drawn(60, 90, 1)).save(path)
    return path


def ask(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


def test_every_way_to_give_an_image(processor: MediaProcessor, picture: Path) -> None:
    data = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    parts: list[dict[str, Any]] = [
        {"type": "image", "image": str(picture)}, {"type": "image", "image": picture},
        {"type": "image", "image": Image.open(picture)}, {"type": "image", "image": picture.read_bytes()},
        {"type": "image_url", "image_url": {"url": data}}, {"type": "image_url", "image_url": data},
        {"image": picture.as_uri()}, {"type": "image", "url": str(picture)},
        {"type": "input_image", "image_url": data},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}},
    ]  # fmt: skip
    prompts = [processor(ask(part, {"type": "text", "text": "What?"})) for part in parts]
    assert len({tuple(prompt.ids) for prompt in prompts}) == 1
    assert len({prompt.media[0].digest for prompt in prompts}) == 1
    tokens = -(-60 // 28) * -(-90 // 28)
    assert prompts[0].ids.count(processor.vision.image_token_id) == tokens == prompts[0].media[0].grid.tokens()


def test_a_text_part_with_null_media_is_text(processor: MediaProcessor) -> None:
    """Dumps of pydantic and Arrow have such nulls."""
    part = {"type": "text", "text": "hi", "image_url": None, "video_url": None, "image": "kept.png"}
    assert processor(ask(part)).ids == processor(ask({"type": "text", "text": "hi"})).ids


def test_media_come_in_the_order_of_their_tokens(processor: MediaProcessor, picture: Path, tmp_path: Path) -> None:
    film = write_video(tmp_path / "a.mp4", np.stack([drawn(28, 56, seed) for seed in range(12)]), 2)
    prompt = processor(ask({"image": str(picture)}, {"type": "text", "text": "and"}, {"video": str(film)}))
    assert [tuple(one.grid) for one in prompt.media] == [(1, 6, 8), (4, 2, 4), (4, 2, 4), (4, 2, 4)]
    text = processor.tokenizer.decode(prompt.ids)
    assert text.count("<|media_pad|>") == 12 + 3 * 2
    for second in (0, 2, 4):
        assert (
            f"00:00:0{second}.000<|media_begin|>video<|media_content|><|media_pad|><|media_pad|><|media_end|>" in text
        )


def test_a_videos_own_token(processor: MediaProcessor, tmp_path: Path) -> None:
    film = write_video(tmp_path / "a.mp4", np.stack([drawn(28, 28, seed) for seed in range(2)]), 2)
    other = MediaProcessor(processor.tokenizer, processor.vision.model_copy(update={"video_token_id": 768}))
    ids = other(ask({"video": str(film)})).ids
    assert ids.count(768) == 1 and processor.vision.image_token_id not in ids


def test_text_forges_no_media(processor: MediaProcessor, picture: Path) -> None:
    forged = {"type": "text", "text": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"}
    prompt = processor(ask(forged, {"image": str(picture)}))
    assert prompt.ids.count(processor.vision.image_token_id) == prompt.media[0].grid.tokens()
    assert not processor(ask(forged)).media


@pytest.mark.parametrize(
    "source", [None, "", 5, "https://example.com/a.png", "data:image/png,raw", "data:image/png;base64,*", {"url": 3}]
)
def test_sources_that_are_none(processor: MediaProcessor, source: Any) -> None:
    with pytest.raises(MediaError, match=r"message 0: content\[0\]"):
        processor(ask({"type": "image", "image": source}))


def test_members_and_paths_without_a_tower(checkpoints: dict[str, Path], picture: Path) -> None:
    with pytest.raises(MediaError, match="no vision tower"):
        MediaProcessor.from_pretrained(checkpoints["thinking"])
    tokenizer = KimiTokenizer.from_pretrained(checkpoints["k2.5"])
    with pytest.raises(TokenizerError, match="media processor"):
        tokenizer.encode_chat(ask({"type": "video", "video": "a.mp4"}))


# What transformers 5.23 and the published file say, and each field at a value that asks for something else.
SAID: dict[str, Any] = {
    "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True, "resample": 3,
    "rescale_factor": 1 / 255, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_sample_frames": True,
    "image_processor_type": "Kimi_K25ImageProcessor", "model_input_names": ["pixel_values"], "patch_size": 14,
    "merge_size": 2, "max_patches": 16384, "size": {"max_height": 512, "max_width": 512},
}  # fmt: skip
OTHERWISE: dict[str, Any] = {
    "do_resize": False, "do_rescale": False, "do_normalize": False, "do_convert_rgb": False, "resample": 2,
    "rescale_factor": 1 / 127.5, "image_mean": [0.4, 0.5, 0.5], "image_std": 0.5, "do_sample_frames": False,
    "do_center_crop": True, "crop_size": {"height": 9}, "do_pad": True, "num_frames": 8, "max_patchs": 9, "foo": None,
    "size": {"shortest_edge": 9}, "fixed_output_tokens": 64, "in_patch_limit_video": 9, "timestamp_mode": "ss",
    "max_num_frames_each_video": 8,
}  # fmt: skip


@pytest.mark.parametrize("inside", [True, False])
def test_fields_of_the_processor_are_obeyed_or_refused(tmp_path: Path, inside: bool) -> None:
    file = tmp_path / "preprocessor_config.json"

    def read(fields: dict[str, Any]) -> MediaConfig:
        file.write_text(json.dumps({"auto_map": {}, "media_proc_cfg": fields} if inside else fields))
        return MediaConfig.from_pretrained(tmp_path)

    assert MediaConfig.from_pretrained(tmp_path) == read(SAID) == MediaConfig()
    assert read({**SAID, "temporal_patch_size": 8, "size": {"max_height": 9, "max_width": 9}}) == MediaConfig(
        frames_a_chunk=8, max_side=9
    )
    assert read({"in_patch_limit": 99, "in_patch_limit_each_frame": 44, "sample_fps": 1}) == MediaConfig(
        max_patches=99, max_patches_a_frame=44, sample_fps=1.0
    )
    for name, value in (*OTHERWISE.items(), ("max_patches", "many"), ("max_patches", 0)):
        with pytest.raises(ConfigError, match=rf"preprocessor_config\.json: field '{name}'|field '{name}'"):
            read({**SAID, name: value})
    (tmp_path / "video_preprocessor_config.json").write_text('{"max_patches": 33, "fps": 4}')
    assert read({"max_patches": 77}) == MediaConfig(max_patches=77, max_patches_a_frame=33, sample_fps=4.0)
    for text in ('{"media_proc_cfg": {}, "image_mean": [0.4, 0.5, 0.5]}', "[]", "{"):  # the first beside what is read
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"preprocessor_config\.json: "):
            MediaConfig.from_pretrained(tmp_path)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_images_are_turned_upright_and_transparency_goes_by_the_rules() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    lying = saved(Image.fromarray(drawn(20, 30, 2)), "PNG", exif=exif)
    assert open_image(lying).size == (20, 30)
    clear = Image.new("RGBA", (2, 2), (10, 20, 30, 0))
    assert to_rgb(clear, MediaConfig(rules="transformers")).getpixel((0, 0)) == (255, 255, 255)
    assert to_rgb(clear, MediaConfig()).getpixel((0, 0)) == clear.convert("RGB").getpixel((0, 0))


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    levels = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4)
    image = open_image(saved(Image.fromarray(levels), "PNG"))
    assert np.asarray(to_rgb(image, MediaConfig()))[..., 0].tolist() == (levels >> 8).tolist()


def limits(draw: random.Random) -> MediaConfig:
    """The published ones, or smaller ones, which more of the drawn sizes exceed."""
    if draw.random() < 0.3:
        return MediaConfig()
    images, frames = (int(2 ** draw.uniform(3, 11)) for _ in range(2))
    return MediaConfig(max_patches=images, max_patches_a_frame=frames, max_side=2 * draw.randint(2, 40))


def published(frames: list[Image.Image], limit: int, side: int) -> tuple[list[int], npt.NDArray[np.float64]]:
    """Grid and pixels by the rule of K2.5's published media_utils.py (navit_resize_image, navit_patchify)."""
    width, height = frames[0].size
    by_count = math.sqrt(limit / (max(1, width // 14) * max(1, height // 14)))
    scale = min(1, by_count, side * 14 / width, side * 14 / height)
    size = (max(1, int(width * scale)), max(1, int(height * scale)))
    rows, columns = -(-size[1] // 28) * 2, -(-size[0] // 28) * 2
    padded = np.zeros((len(frames), rows * 14, columns * 14, 3))
    for canvas, frame in zip(padded, frames, strict=True):
        canvas[: size[1], : size[0]] = np.asarray(frame.convert("RGB").resize(size, Image.Resampling.BICUBIC))
    cut = [
        frame[top : top + 14, left : left + 14].transpose(2, 0, 1)
        for frame in padded
        for top in range(0, rows * 14, 14)
        for left in range(0, columns * 14, 14)
    ]
    return [len(frames), rows, columns], (np.stack(cut) / 255 - 0.5) * 2


def by_vllm(kind: str, media: Any, config: MediaConfig) -> tuple[list[int], npt.NDArray[np.float64]] | None:
    """The same by vLLM's processor of K2.5, where vLLM is installed."""
    try:
        from vllm.transformers_utils.processors.kimi_k25_vision_fused import KimiK25FusedVisionProcessor
    except ImportError:
        return None
    made = KimiK25FusedVisionProcessor(config.to_published_dict()).preprocess([{"type": kind, kind: media}])
    return made["grid_thws"][0].tolist(), made["pixel_values"].double().numpy()


@pytest.mark.parametrize("seed", range(DRAWN))
def test_drawn_images_as_the_models_own_processor(seed: int) -> None:
    draw = random.Random(seed)
    config = limits(draw)
    height, width = (int(2 ** draw.uniform(0, 10 if seed % 8 else 13)) for _ in range(2))
    mode = [*MODES, "I;16"][draw.randrange(len(MODES) + 1)]
    if mode == "I;16":
        image = Image.fromarray(drawn(height, width, seed)[..., 0].astype(np.uint16) << 8)
    else:
        image = in_mode(drawn(height, width, seed), mode, seed)
    ours = process_image(image, config)
    for expected in (published([image], config.max_patches, config.max_side), by_vllm("image", image, config)):
        if expected is not None:
            assert list(ours.grid) == expected[0]
            if mode != "I;16":  # which the published processor clips at 255
                assert np.abs(normalised(ours.patches).numpy() - expected[1]).max() < 1e-6


# Frames and frames a second of which transformers' rule takes others.
KNOWN = {1: (24, 25.0), 2: (120, 24.0), 3: (7, 29.97)}


@pytest.mark.parametrize("seed", range(DRAWN))
def test_drawn_videos_as_the_models_own_processor(seed: int) -> None:
    """By `split_video_chunks` of its published kimi_k25_vision_processing.py: frames, time stamps, grids, pixels."""
    draw = random.Random(seed)
    config = limits(draw)
    total, fps = (
        draw.randint(1, 250),
        draw.choice([0.5, 1, 2, 3, 12.5, 23.976, 24, 25, 29.97, 60, draw.uniform(0.3, 120)]),
    )
    total, fps = KNOWN.get(seed, (total, fps))
    height, width = (int(2 ** draw.uniform(2, 7 if seed % 8 else 10.2)) for _ in range(2))
    still = drawn(height, width, seed)
    frames = [np.roll(still, place, axis=1) ^ np.uint8(place) for place in range(total)]
    count = max(round(total * min(2.0, fps) / fps), 1)
    places = np.linspace(0, total - 1, count).round().astype(int).tolist()
    chunks = chunks_of_frames(frames, fps, config)
    assert len(chunks) == -(-count // 4)
    for number, chunk in enumerate(chunks):
        taken = [Image.fromarray(frames[place]) for place in places[4 * number : 4 * number + 4]]
        start = places[4 * number] / fps
        said = datetime.fromtimestamp(start, tz=UTC).strftime("%H:%M:%S") + f".{int(start % 1 * 1000):03d}"
        assert chunk.seconds is not None and timestamp(chunk.seconds) == said
        rule = published(taken, config.max_patches_a_frame, config.max_side)
        for expected in (rule, by_vllm("video_chunk", taken, config)):
            if expected is not None:
                assert list(chunk.grid) == expected[0]
                assert np.abs(normalised(chunk.patches).numpy() - expected[1]).max() < 1e-6
