"""Prompts with images and a video beside text, of an application and of the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import schedule
import torch
from plain import decode_step

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import prefill
from kimi_k2.engine.vision import MediaRows
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.vision_config import Grid

ARRIVAL = [2, 0, 3, 1]


def pixels_of(grids: list[Grid], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(sum(grid.patches for grid in grids), 3, 14, 14, generator=generator) * 2 - 1


class Media(NamedTuple):
    """A script of prompts with media: together, or one by one into lines of the cache; then forced tokens."""

    prompts: list[list[int]]
    media: list[list[tuple[torch.Tensor, Grid]]]
    forced: list[list[int]]
    steps: list[list[int]] | None = None  # lines of each step, in continuous batching

    def run(self, app: Any) -> torch.Tensor:
        """Logits [rows, vocab] of prompts and steps."""
        at = [len(prompt) for prompt in self.prompts]
        if self.steps is None:
            logits = [app.prefill(self.prompts, self.media).logits[:, -1]]
        else:
            logits = [
                app.prefill([self.prompts[line]], [self.media[line]], torch.tensor([line])).logits[:, -1]
                for line in ARRIVAL
            ]
        for lines in self.steps or [[0, 1, 2, 3]] * len(self.forced[0]):
            tokens = [[self.forced[line][at[line] - len(self.prompts[line])]] for line in lines]
            ids = {} if self.steps is None else {"seq_ids": torch.tensor(lines)}
            logits.append(schedule.decode(app, tokens, [at[line] for line in lines], **ids).logits[:, -1])
            for line in lines:
                at[line] += 1
        return torch.cat(logits)

    def expected(self, checkpoint: Path) -> torch.Tensor:
        """The plain model's."""
        config = KimiK2Config.from_pretrained(checkpoint)
        assert config.vision is not None
        tower, plain = VisionModel.from_pretrained(checkpoint), KimiK2ForCausalLM.from_pretrained(checkpoint)
        features = [[tower(pixels, [grid]) for pixels, grid in own] for own in self.media]
        rows = MediaRows.of(self.prompts, features, config.vision.media_token_ids)
        lengths = torch.tensor([len(prompt) for prompt in self.prompts])
        cache = plain.new_cache(4, int(lengths.max()) + 6)
        wanted = [prefill(plain, self.prompts, cache, media=rows)]
        for step, tokens in enumerate(zip(*self.forced, strict=True)):
            wanted.append(decode_step(plain, torch.tensor(tokens), lengths + step, cache))
        if self.steps is None:
            return torch.cat(wanted)
        done, found = [0] * 4, [wanted[0][line] for line in ARRIVAL]
        for line in (line for lines in self.steps for line in lines):
            done[line] += 1
            found.append(wanted[done[line]][line])
        return torch.stack(found)


def drawn_case(checkpoint: Path, steps: list[list[int]] | None = None) -> Media:
    """Text, one image, and a video chunk beside two images; six tokens that decode is fed."""
    config = KimiK2Config.from_pretrained(checkpoint)
    assert config.vision is not None
    token, draw = config.vision.image_token_id, torch.Generator().manual_seed(3)
    grids = [[], [Grid(1, 4, 6)], [Grid(3, 2, 4), Grid(1, 2, 2), Grid(1, 4, 4)], []]
    prompts = schedule.drawn(4, 3)
    for prompt, own in zip(prompts, grids, strict=True):
        for grid in own:
            prompt += [*[token] * grid.tokens(), 5]
    media = [[(pixels_of([grid], draw), grid) for grid in own] for own in grids]
    return Media(prompts, media, schedule.drawn(4, 6, seed=4), steps)
