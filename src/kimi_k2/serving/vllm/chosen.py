"""Experts chosen for each token, which answers have with `--enable-return-routed-experts`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from kimi_k2.engine.layer_step import Place


class Chosen(nn.Module):
    """Of one layer, as vLLM looks for it in a model: its `RoutedExpertsCaptureSource`.

    Args:
        layer: its number in the model.
        place: where experts are held, if not by their own numbers.

    Attributes:
        capture_fn: vLLM's, which keeps the numbers of a step; None before there is a cache.
    """

    def __init__(self, layer: int, place: Place | None) -> None:
        super().__init__()
        self.layer_id, self.place = layer, place
        self.capture_fn: Callable[[Tensor], None] | None = None

    def forward(self, indices: Tensor) -> Tensor:
        """Of experts chosen [T, k], numbers of the model's, the numbers by which ranks hold them."""
        if self.capture_fn is not None:
            self.capture_fn(indices)
        return indices if self.place is None else self.place(indices)
