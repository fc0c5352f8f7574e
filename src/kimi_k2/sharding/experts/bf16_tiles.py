"""Experts in the model's own float type, in tiles for the NKI kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kimi_k2.sharding.experts.bf16 import FloatExperts
from kimi_k2.sharding.experts.format import register
from kimi_k2.sharding.experts.tiled import TiledExperts, check_width, shared_width

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout


@register
@dataclass(frozen=True)
class FloatTiles(TiledExperts, FloatExperts):
    """Dequantized weights in the model's dtype.

    Attributes:
        shared_width: a rank's columns of the shared expert; 0 where the kernel does not take so many.
    """

    shared_width: int = 0

    name = "bf16_tiles"

    @classmethod
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> FloatTiles:
        """With the shared expert's width; the kernel takes some sizes alone.

        Raises:
            ConfigError: see `check_width`.
        """
        check_width(config, layout)
        return cls(shared_width(config, layout))

    @property
    def shared(self) -> FloatTiles | None:
        """The same."""
        return FloatTiles() if self.shared_width else None
