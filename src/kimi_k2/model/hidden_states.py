"""Hidden states between a target's layers, which an Eagle3 draft reads beside its tokens."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor


class HiddenStates:
    """Takes the residual stream before some of the layers, as a forward pass goes by.

    Args:
        layers: layer i is the stream before decoder layer i, as vLLM numbers it: what layer i - 1 returned, or the
            embedding for 0. The number of layers is the stream behind the last, before the final norm.
    """

    def __init__(self, layers: Collection[int]) -> None:
        self.layers = tuple(layers)
        self._taken: dict[int, Tensor] = {}

    def pass_by(self, layer: int, x: Tensor, delta: Tensor | None = None) -> None:
        """The stream before `layer`: x, or x + delta."""
        if layer in self.layers:
            self._taken[layer] = x if delta is None else x + delta

    def apart(self) -> list[Tensor]:
        """In the order of `layers`."""
        return [self._taken[layer] for layer in self.layers]

    def joined(self) -> Tensor:
        """Side by side in the order of `layers`: [..., layers * H]."""
        return torch.cat(self.apart(), dim=-1)
