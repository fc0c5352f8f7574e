"""Which token of a batch of prompts stands for which row of the tower's output."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.errors import MediaError


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
            places = torch.isin(ids, torch.tensor(sorted(media_token_ids)))
            rows, tokens = sum(len(one) for one in own), int(places.sum())
            if rows != tokens:
                raise MediaError(f"prompt {number} has {tokens} media tokens, its images and videos have {rows}")
            index.append(torch.where(places, places.cumsum(0) - 1 + first, -1))
            first += rows
        return cls(torch.cat([one for own in features for one in own]), tuple(index)) if first else None

    def padded(self, length: int) -> Tensor:
        """int64 [B, length]."""
        out = torch.full((len(self.index), length), -1, dtype=torch.int64)
        for row, own in enumerate(self.index):
            out[row, : len(own)] = own
        return out
