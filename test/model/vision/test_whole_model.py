"""A whole tiny K2.5 against transformers': text, images and a video in one batch, prefill and 32 decode steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import drawn, write_video
from PIL import Image
from plain import along
from plain_tokens import answers, media_rows, parts

from kimi_k2.api import KimiK2, Prompt
from kimi_k2.engine.generate import prefill
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.engine.vision import MediaRows
from kimi_k2.errors import MediaError
from kimi_k2.media.patches import normalised
from kimi_k2.parity.reference import transformers_features

TOLERANCE = 1e-5
DECODE_STEPS = 32


@pytest.fixture(scope="module")
def model(k25: Path) -> KimiK2:
    return KimiK2.from_pretrained(k25)


@pytest.fixture(scope="module")
def prompts(model: KimiK2, tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    """Text alone, one image, five images of other sizes (one of them twice), a video with an image."""
    film = tmp_path_factory.mktemp("films") / "a.mp4"
    write_video(film, np.stack([drawn(56, 84, seed) for seed in range(21)]), 6)
    sizes = [(28, 28), (100, 50), (30, 200), (64, 64)]
    images = [{"image": Image.fromarray(drawn(*size, seed))} for seed, size in enumerate(sizes)]
    contents: list[Any] = [
        "Tell me a story.",
        [images[1], {"type": "text", "text": "What is this?"}],
        [*images, {"type": "text", "text": "Compare with "}, images[1]],
        [{"type": "text", "text": "At "}, {"video": str(film)}, {"type": "text", "text": " it looks like"}, images[0]],
    ]
    return [model.prompt([{"role": "user", "content": content}]) for content in contents]


def reference_logits(reference: Any, prompt: Prompt, new: list[int]) -> torch.Tensor:
    """One uncached pass of transformers' whole model over a prompt and what followed."""
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    config, video = reference.config, reference.config.video_token_id
    ids = torch.tensor([prompt.ids + new])
    # Ours writes one token for both kinds of media here; transformers wants its own for videos.
    order = [item for item in prompt.media for _ in range(item.grid.tokens())]
    positions = (ids[0] == config.image_token_id).nonzero()[:, 0].tolist()
    for position, item in zip(positions, order, strict=True):
        if item.seconds is not None:
            ids[0, position] = video
    outputs = {}
    for kind, own in (
        ("image", [item for item in prompt.media if item.seconds is None]),
        ("video", [item for item in prompt.media if item.seconds is not None]),
    ):
        if own:
            pixels = normalised(torch.cat([item.patches for item in own]))
            features = transformers_features(reference, pixels, [item.grid for item in own])
            outputs[kind] = BaseModelOutputWithPooling(pooler_output=tuple(features))
    with torch.inference_mode():
        logits: torch.Tensor = reference(input_ids=ids, mm_encoder_outputs=outputs or None).logits[0]
    return logits


def test_mixed_batch(model: KimiK2, prompts: list[Prompt], reference: Any) -> None:
    assert [len(prompt.media) for prompt in prompts] == [0, 1, 5, 3]
    plain, out = parts(model)[0], answers(model, prompts, SamplingParams(DECODE_STEPS + 1, ignore_eos=True))
    full = [reference_logits(reference, prompt, new) for prompt, new in zip(prompts, out, strict=True)]
    ids, worst = [prompt.ids for prompt in prompts], 0.0
    for step, logits in enumerate(along(plain, ids, out, media=media_rows(model, prompts))):
        for row, own in enumerate(ids):
            expected = full[row][len(own) + step - 1]
            worst = max(worst, float((logits[row] - expected).abs().max()))
            assert int(expected.argmax()) == out[row][step]
    print(f"\nmax |logit difference| {worst:.2e} on logits up to {max(float(rows.abs().max()) for rows in full):.2f}")
    assert worst <= TOLERANCE


def test_chunked_prefill_cuts_through_images(model: KimiK2, prompts: list[Prompt]) -> None:
    plain, ids, rows = parts(model)[0], [prompt.ids for prompt in prompts], media_rows(model, prompts)
    longest = max(map(len, ids))
    whole = prefill(plain, ids, plain.new_cache(len(ids), longest), media=rows)
    for size in (7, 33):
        cache = plain.new_cache(len(ids), longest)
        torch.testing.assert_close(prefill(plain, ids, cache, size, rows), whole, rtol=0, atol=TOLERANCE)


def test_a_token_outside_the_vocabulary(model: KimiK2, prompts: list[Prompt]) -> None:
    """Videos of members with a token of their own, 163840 of 163840."""
    prompt, (plain, encoder) = prompts[3], parts(model)
    image, features = encoder.config.image_token_id, [encoder.encode(prompt.media)]
    outside = [768 if token == image else token for token in prompt.ids]
    results = [
        prefill(plain, [ids], plain.new_cache(1, len(ids)), media=MediaRows.of([ids], features, (image, 768)))
        for ids in (prompt.ids, outside)
    ]
    assert torch.equal(*results)


def test_tokens_and_images_must_agree(model: KimiK2, prompts: list[Prompt]) -> None:
    prompt = prompts[2]
    for media in ((), prompt.media[:-1], (*prompt.media, prompt.media[0])):
        with pytest.raises(MediaError, match="media tokens"):
            media_rows(model, [replace(prompt, media=media)])
