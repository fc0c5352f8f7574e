"""Experts in the model's own float type, in tiles for the NKI kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

    @classmethod
    def from_neuron_config(cls, neuron_config: Any) -> FloatTiles:
        """With the width that `shared_expert_tiles` names."""
        return cls(neuron_config.shared_expert_tiles)

    def neuron_options(self) -> dict[str, Any]:
        """Tiles."""
        return {"expert_tiles": True, "shared_expert_tiles": self.shared_width}

    @property
    def shared(self) -> FloatTiles | None:
        """The same."""
        return FloatTiles() if self.shared_width else None
