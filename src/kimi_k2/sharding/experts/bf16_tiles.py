"""Experts in the model's own float type, in tiles for the NKI kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kimi_k2.sharding.experts.bf16 import FloatExperts
from kimi_k2.sharding.experts.format import register
from kimi_k2.sharding.experts.tiled import TiledExperts, check_width

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout


@register
@dataclass(frozen=True)
class FloatTiles(TiledExperts, FloatExperts):
    """Dequantized weights in the model's dtype."""

    name = "bf16_tiles"

    @classmethod
    def for_layout(cls, config: KimiK2Config, layout: Layout) -> FloatTiles:
        """Nothing depends on sizes, but the kernel takes some alone.

        Raises:
            ConfigError: see `check_width`.
        """
        check_width(config, layout)
        return cls()

    def neuron_options(self) -> dict[str, Any]:
        """Tiles."""
        return {"expert_tiles": True}
