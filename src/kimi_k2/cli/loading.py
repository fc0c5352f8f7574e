"""A model with a progress bar."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_k2.model.decoder import KimiK2ForCausalLM


def load_model(checkpoint: Path, **options: Any) -> KimiK2ForCausalLM:
    """`KimiK2ForCausalLM.from_pretrained` with a progress bar."""
    from kimi_k2.checkpoint.reader import CheckpointReader
    from kimi_k2.config import KimiK2Config
    from kimi_k2.model.decoder import KimiK2ForCausalLM
    from kimi_k2.progress import ByteProgress

    with CheckpointReader(checkpoint, KimiK2Config.from_pretrained(checkpoint).tensor_prefix) as reader:
        total = reader.total_bytes
    with ByteProgress("loading", total) as bar:
        return KimiK2ForCausalLM.from_pretrained(checkpoint, on_tensor=lambda _, count: bar.advance(count), **options)
