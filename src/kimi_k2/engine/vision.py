"""Embeddings of images: packed for the tower, kept by their content, dealt out to ranks if there are any.

Packs are formed by one rule whatever the number of ranks, and a pack is one call of the tower, so that any number of
ranks gives the same bits as one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.errors import MediaError
from kimi_k2.media.patches import Media, normalised
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.ops.vision import uploaded
from kimi_k2.vision_config import VisionConfig

# Patches of a pack, where images are smaller: on an H200 16 images of 448 pixels take 34 ms in packs of 8192 as of
# 16384, 53 in packs of 4096, which the host launches more slowly than the GPU runs them. Ranks share out whole packs.
PACK_PATCHES = 8192
CACHE_BYTES = 2**28

# Runs packs and gives the embeddings of each, in their order.
Run = Callable[[Sequence[Sequence[Media]]], list[Tensor]]


class VisionEncoder:
    """The tower with its cache.

    Args:
        model: tower and projector.
        pack_patches: images share a call of the tower up to so many patches.
        cache_bytes: of embeddings that are kept, those used last; 0 keeps none.
        run: who runs the packs; None runs them here. See `parallel.vision`.
    """

    def __init__(
        self,
        model: VisionModel,
        *,
        pack_patches: int = PACK_PATCHES,
        cache_bytes: int = CACHE_BYTES,
        run: Run | None = None,
    ) -> None:
        self.model, self.pack_patches, self.cache_bytes = model, pack_patches, cache_bytes
        self._run = run or (lambda packs: [run_pack(model, pack) for pack in packs])
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._bytes = 0

    @property
    def config(self) -> VisionConfig:
        """Of the tower."""
        return self.model.config

    def encode(self, media: Sequence[Media]) -> list[Tensor]:
        """Embeddings [tokens, H] of each image or video chunk. Equal ones are computed once.

        Raises:
            MediaError: a grid is none that the tower takes.
        """
        for item in media:
            self.config.check_grid(item.grid)
        embeddings: dict[str, Tensor] = {}
        new: dict[str, Media] = {}
        for item in media:
            if item.digest in self._kept:
                self._kept.move_to_end(item.digest)
                embeddings[item.digest] = self._kept[item.digest]
            else:
                new.setdefault(item.digest, item)
        packs = packed(list(new.values()), self.pack_patches)
        for pack, rows in zip(packs, self._run(packs), strict=True):
            merge = self.config.merge_kernel_size
            for item, own in zip(pack, rows.split([item.grid.tokens(merge) for item in pack]), strict=True):
                embeddings[item.digest] = own
                self._keep(item.digest, own)
        return [embeddings[item.digest] for item in media]

    def rows(self, prompts: Sequence[Sequence[int]], media: Sequence[Sequence[Media]]) -> MediaRows | None:
        """Rows for a batch's token ids, its images and video chunks encoded in one call; None if it has no media token.

        Raises:
            MediaError: a prompt's media tokens are not those of its images and videos.
        """
        encoded = iter(self.encode([item for own in media for item in own]))
        features = [[next(encoded) for _ in own] for own in media]
        return MediaRows.of(prompts, features, self.config.media_token_ids)

    def _keep(self, digest: str, rows: Tensor) -> None:
        if rows.nbytes > self.cache_bytes:
            return
        # A copy: a view would keep its whole pack.
        self._kept[digest] = rows.clone()
        self._bytes += rows.nbytes
        while self._bytes > self.cache_bytes:
            self._bytes -= self._kept.popitem(last=False)[1].nbytes


def packed(media: Sequence[Media], most: int) -> list[list[Media]]:
    """Images in their order, in packs of up to `most` patches; a larger image has a pack of its own."""
    packs: list[list[Media]] = []
    left = 0
    for item in media:
        if item.grid.patches > left:
            packs.append([])
            left = most
        packs[-1].append(item)
        left -= item.grid.patches
    return packs


def run_pack(model: VisionModel, pack: Sequence[Media]) -> Tensor:
    """Embeddings of a pack's images, one after another: [tokens, H]."""
    patches = uploaded(torch.cat([item.patches for item in pack]), model.device)
    out: Tensor = model(normalised(patches, model.dtype), [item.grid for item in pack])
    return out


@dataclass(frozen=True)
class MediaRows:
    """Embeddings of a batch's images and videos.

    Attributes:
        features: [M, H], of all prompts one after another.
        index: a prompt's int64 [tokens], the row of each token that stands for one, -1 for text.
    """

    features: Tensor
    index: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, prompts: Sequence[Sequence[int]], features: Sequence[Sequence[Tensor]], media_token_ids: Collection[int]
    ) -> MediaRows | None:
        """Rows in the order in which the prompts' media tokens stand; None if no prompt has any.

        Args:
            prompts: token ids.
            features: of each prompt its images and video chunks in their order, each [tokens, H].
            media_token_ids: the tokens that stand for rows, `VisionConfig.media_token_ids`.

        Raises:
            MediaError: a prompt has another number of such tokens than of rows.
        """
        index, first = [], 0
        for number, (prompt, own) in enumerate(zip(prompts, features, strict=True)):
            ids = torch.as_tensor(prompt, dtype=torch.int64)
            is_media = torch.isin(ids, torch.tensor(sorted(media_token_ids)))
            rows, tokens = sum(len(item) for item in own), int(is_media.sum())
            if rows != tokens:
                raise MediaError(f"prompt {number} has {tokens} media tokens, its images and videos have {rows}")
            index.append(torch.where(is_media, is_media.cumsum(0) - 1 + first, -1))
            first += rows
        return cls(torch.cat([item for own in features for item in own]), tuple(index)) if first else None

    def padded(self, length: int) -> Tensor:
        """int64 [B, length]."""
        out = torch.full((len(self.index), length), -1, dtype=torch.int64)
        for row, own in enumerate(self.index):
            out[row, : len(own)] = own
        return out
