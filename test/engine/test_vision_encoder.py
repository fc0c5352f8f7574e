"""The encoder's cache and packs, with a tower that only counts."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_k2.engine.vision import VisionEncoder, packed
from kimi_k2.media.patches import Media
from kimi_k2.vision_config import Grid, VisionConfig

CONFIG = VisionConfig(image_token_id=533)
WIDTH = 8  # of the rows that the tower gives, float32: an image of 2 x 2 patches is one row of 32 bytes


def picture(value: int, height: int = 2, width: int = 2) -> Media:
    return Media(Grid(1, height, width), torch.full((height * width, 3, 14, 14), value, dtype=torch.uint8))


class Tower:
    """Gives the first byte of an image in every row of it, and remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, packs: Sequence[Sequence[Media]]) -> list[Tensor]:
        self.seen += [int(one.patches[0, 0, 0, 0]) for pack in packs for one in pack]
        return [torch.cat([self.rows(one) for one in pack]) for pack in packs]

    @staticmethod
    def rows(item: Media) -> Tensor:
        return torch.full((item.grid.tokens(CONFIG.merge_kernel_size), WIDTH), float(item.patches[0, 0, 0, 0]))


def encoder(tower: Tower, **options: Any) -> VisionEncoder:
    model: Any = SimpleNamespace(config=CONFIG)
    return VisionEncoder(model, run=tower, **options)


A, B, C, LARGE = (picture(1), picture(2), picture(3), picture(4, 2, 4))  # of one row each, the last of two


@pytest.mark.parametrize(("rows", "calls", "seen"), [
    # C comes in the place of B, which was used before A.
    (2, [[A, B], [A], [C], [A, C], [B]], [1, 2, 3, 2]),
    # What is larger than the cache throws nothing out.
    (1, [[A, LARGE, A, LARGE], [A], [LARGE], [A]], [1, 4, 4]),
])  # fmt: skip
def test_what_was_used_last_is_kept(rows: int, calls: list[list[Media]], seen: list[int]) -> None:
    tower = Tower()
    kept = encoder(tower, cache_bytes=rows * 4 * WIDTH)
    for media in calls:
        found = kept.encode(media)
        assert all(each.equal(Tower.rows(item)) for each, item in zip(found, media, strict=True))
    assert tower.seen == seen


def test_a_kept_row_does_not_keep_its_pack() -> None:
    kept = encoder(Tower())
    media = [picture(value) for value in range(4)]
    kept.encode(media)
    for rows in kept.encode(media):
        assert rows.untyped_storage().nbytes() == rows.nbytes


def test_the_same_bytes_in_another_grid_are_another_image() -> None:
    wide, high = picture(1, 2, 4), picture(1, 4, 2)
    assert wide.patches.equal(high.patches)
    assert wide.digest != high.digest
    assert wide.digest == picture(1, 2, 4).digest


@pytest.mark.parametrize(
    ("patches", "most", "packs"),
    [
        ([4, 4, 4, 4], 8, [[4, 4], [4, 4]]),
        ([4, 8, 4], 8, [[4], [8], [4]]),
        ([4, 16, 4, 4], 8, [[4], [16], [4, 4]]),
        ([4, 4], 100, [[4, 4]]),
        ([], 8, []),
    ],
)
def test_packs(patches: list[int], most: int, packs: list[list[int]]) -> None:
    media = [picture(0, 2, number // 2) for number in patches]
    assert [[item.grid.patches for item in pack] for pack in packed(media, most)] == packs
