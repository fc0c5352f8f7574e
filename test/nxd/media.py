"""Prompts with images and a video beside text, of an application and of the plain model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import schedule
import torch
from environment import contrib
from schedule import EVERY, Script, Tokens

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.vision import MediaRows
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.vision_config import Grid

Media = list[tuple[torch.Tensor, Grid]]  # pixels and grid of each of a prompt's images and video chunks


def pixels_of(grids: list[Grid], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(sum(grid.patches for grid in grids), 3, 14, 14, generator=generator) * 2 - 1


def drawn(checkpoint: Path) -> tuple[list[Tokens], list[Media]]:
    """Text, one image, and a video chunk beside two images."""
    config = KimiK2Config.from_pretrained(checkpoint)
    assert config.vision is not None
    token, draw = config.vision.image_token_id, torch.Generator().manual_seed(3)
    grids = [[], [Grid(1, 4, 6)], [Grid(3, 2, 4), Grid(1, 2, 2), Grid(1, 4, 4)], []]
    prompts = schedule.drawn(4, 3)
    for prompt, own in zip(prompts, grids, strict=True):
        for grid in own:
            prompt += [*[token] * grid.tokens(), 5]
    return prompts, [[(pixels_of([grid], draw), grid) for grid in own] for own in grids]


def script_of(prompts: list[Tokens], media: list[Media], steps: list[list[int]] | None = None) -> Script:
    """Prompts with media together, or one by one into cache lines; then steps of all lines, or of some."""
    lines = [2, 0, 3, 1] if steps else EVERY
    script = Script([["media", prompts, media, None]], [prompts[line] for line in lines])
    if steps:
        script.steps[:] = [["media", [prompts[line]], [media[line]], [line]] for line in lines]
    at = [len(prompt) for prompt in prompts]
    rows = [prompt + forced for prompt, forced in zip(prompts, schedule.drawn(4, 6, seed=4), strict=True)]
    for some in steps or [EVERY] * 6:
        script.decode(rows, at, some)
    return script


def model_of(checkpoint: Path, prompts: list[Tokens], media: list[Media]) -> Callable[[torch.Tensor], Any]:
    """The plain model of one text [1, S], which begins with one of the prompts."""
    config = KimiK2Config.from_pretrained(checkpoint)
    assert config.vision is not None
    tower, plain = VisionModel.from_pretrained(checkpoint), KimiK2ForCausalLM.from_pretrained(checkpoint)
    features = [[tower(pixels, [grid]) for pixels, grid in own] for own in media]

    def logits(ids: torch.Tensor) -> Any:
        (text,) = ids.tolist()
        (own,) = [own for prompt, own in zip(prompts, features, strict=True) if text[: len(prompt)] == prompt]
        rows = MediaRows.of([text], [own], config.vision.media_token_ids)  # type: ignore[union-attr]
        if rows is None:
            return plain(ids)
        index = rows.padded(len(text))
        return plain(ids.masked_fill(index >= 0, 0), media=(index, rows.features))

    return logits


def application(checkpoint: Path, options: dict[str, Any], tower: dict[str, Any], **more: Any) -> Any:
    """NxDI's image-to-text base, not loaded: options of the text, of the tower, and of both."""
    module, config = contrib("image_to_text"), contrib("config")
    both = {"torch_dtype": torch.float32, **more}
    text = config.KimiK2NeuronConfig(**{**options, **both})
    vision = module.KimiK25VisionNeuronConfig(**{**both, **tower})
    inference = module.KimiK25InferenceConfig(text, vision, load_config=config.load_kimi_config(checkpoint))
    return module.NeuronKimiK25ForImageToText(str(checkpoint), inference)
