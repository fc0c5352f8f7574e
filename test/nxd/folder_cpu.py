"""What NxDI's CPU mode lacks for the folder; nothing of it is needed on a device."""

from __future__ import annotations

from typing import Any


def load(app: Any) -> None:
    """Load an application in CPU mode, with a model for each stage: they differ, as they do on a device."""
    kept = app.config.neuron_config.is_continuous_batching
    app.config.neuron_config.is_continuous_batching = True
    try:
        app.to_cpu()
    finally:
        app.config.neuron_config.is_continuous_batching = kept
