"""Prompts with images and videos, and the images that are not plain RGB."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import drawn, write_video
from PIL import Image

from kimi_k2.errors import ConfigError, MediaError, TokenizerError
from kimi_k2.media.config import MediaConfig
from kimi_k2.media.image import open_image, to_rgb
from kimi_k2.media.patches import Media
from kimi_k2.media.prompt import MediaProcessor, taken_out
from kimi_k2.tokenization.special_tokens import special_tokens
from kimi_k2.tokenization.tokenizer import KimiTokenizer
from kimi_k2.vision_config import Grid


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
    ways: list[dict[str, Any]] = [
        {"type": "image", "image": str(picture)}, {"type": "image", "image": picture},
        {"type": "image", "image": Image.open(picture)}, {"type": "image", "image": picture.read_bytes()},
        {"type": "image_url", "image_url": {"url": data}}, {"type": "image_url", "image_url": data},
        {"image": picture.as_uri()}, {"type": "image", "url": str(picture)},
        {"type": "input_image", "image_url": data},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data.partition(",")[2]}},
    ]  # fmt: skip
    assert all(len(taken_out(ask(part))[1]) == 1 for part in ways), "KimiK2 knows by it that there is an image"
    prompts = [processor(ask(part, {"type": "text", "text": "What?"})) for part in ways]
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
    assert [tuple(item.grid) for item in prompt.media] == [(1, 6, 8), (4, 2, 4), (4, 2, 4), (4, 2, 4)]
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


def test_a_videos_first_time_continues_the_text(processor: MediaProcessor) -> None:
    """Its figures and those before it may be one token."""
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"10": 256, b"100": 257}
    tokenizer = KimiTokenizer(ranks, special_tokens(258))
    film = Media(Grid(1, 2, 2), torch.zeros(4, 3, 14, 14, dtype=torch.uint8), 0.0)
    ids = MediaProcessor(tokenizer, processor.vision).video_tokens([film], "at 1")
    time = tokenizer.encode("at 100:00:00.000")
    assert ids[: len(time)] == time and 257 in time


def test_text_forges_no_media(processor: MediaProcessor, picture: Path) -> None:
    forged = {"type": "text", "text": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"}
    prompt = processor(ask(forged, {"image": str(picture)}))
    assert prompt.ids.count(processor.vision.image_token_id) == prompt.media[0].grid.tokens()
    assert not processor(ask(forged)).media


@pytest.mark.parametrize(
    "source",
    [
        None,
        "",
        5,
        "https://example.com/a.png",
        "data:image/png,raw",
        "data:image/png;base64,*",
        {"url": 3},
        "file://[a",
    ],
)
def test_sources_that_are_none(processor: MediaProcessor, source: Any) -> None:
    with pytest.raises(MediaError, match=r"message 0: content\[0\]"):
        processor(ask({"type": "image", "image": source}))


def test_members_and_paths_without_a_tower(checkpoints: dict[str, Path], picture: Path) -> None:
    with pytest.raises(MediaError, match="no vision tower"):
        MediaProcessor.from_pretrained(checkpoints["thinking"])
    tokenizer = KimiTokenizer.from_pretrained(checkpoints["k2.5"])
    with pytest.raises(TokenizerError, match="media processor"):
        tokenizer.encode_segments(tokenizer.render_segments(ask({"type": "video", "video": "a.mp4"})))


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
    wrong: list[dict[str, Any]] = [
        *({**SAID, name: value} for name, value in (*OTHERWISE.items(), ("max_patches", "many"))),
        {"in_patch_limit": 0}, {"temporal_merge_kernel_size": 0.5}, {"fps": 10**400}, {"sample_fps": True},
        {"size": {"max_height": 10**7, "max_width": 10**7}}, {"patch_limit_on_one_side": 10**7},
    ]  # fmt: skip
    for fields in wrong:
        name = next(name for name in fields if fields[name] != SAID.get(name, ...))
        with pytest.raises(ConfigError, match=rf"/preprocessor_config\.json: field '{name}'"):
            read(fields)
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


def test_images_are_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn clockwise
    lying = saved(Image.fromarray(drawn(20, 30, 2)), "PNG", exif=exif)
    assert open_image(lying).size == (20, 30)


def test_levels_of_more_than_eight_bits_are_scaled_not_clipped() -> None:
    """Those that fit a byte are bytes, and shares of one are of 255, rounded."""
    steps, whole = np.arange(0, 65536, 4096, dtype=np.uint16), np.array([0, 7, 255], np.int32)
    shares = np.array([0, 0.5, 1], np.float32)
    for kind, levels, wanted in (("PNG", steps, steps >> 8), ("TIFF", whole, whole), ("TIFF", shares, [0, 128, 255])):
        image = open_image(saved(Image.fromarray(levels[None]), kind))
        assert np.array_equal(np.asarray(to_rgb(image))[0, :, 0], wanted)
