"""Experts chosen for each token, which answers have with `--enable-return-routed-experts`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Chosen(nn.Module):
    """Of one layer, as vLLM looks for it in a model: its `RoutedExpertsCaptureSource`.

    Args:
        layer: its number in the model.

    Attributes:
        capture_fn: vLLM's, which keeps the numbers of a step; None before there is a cache.
    """

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer_id = layer
        self.capture_fn: Callable[[Tensor], None] | None = None

    def forward(self, indices: Tensor) -> Tensor:
        """Where experts chosen [T, k] are held: by their own numbers, of which vLLM is told."""
        if self.capture_fn is not None:
            self.capture_fn(indices)
        return indices
