"""A model with a progress bar."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from kimi_k2.config import KimiK2Config
    from kimi_k2.engine.vision import VisionEncoder
    from kimi_k2.media.prompt import MediaProcessor
    from kimi_k2.model.decoder import KimiK2ForCausalLM
    from kimi_k2.tokenization.tokenizer import KimiTokenizer


def load_model(checkpoint: Path, **options: Any) -> KimiK2ForCausalLM:
    """`KimiK2ForCausalLM.from_pretrained` with a progress bar."""
    import torch

    from kimi_k2.checkpoint.reader import CheckpointReader
    from kimi_k2.config import KimiK2Config
    from kimi_k2.model.decoder import KimiK2ForCausalLM
    from kimi_k2.progress import ByteProgress

    with CheckpointReader(checkpoint, KimiK2Config.from_pretrained(checkpoint).tensor_prefix) as reader:
        total = reader.total_bytes
    try:
        with ByteProgress("loading", total) as bar:
            return KimiK2ForCausalLM.from_pretrained(
                checkpoint, on_tensor=lambda _, count: bar.advance(count), **options
            )
    except torch.OutOfMemoryError as error:
        error.add_note(f"the weights have {total / 1e9:.1f} GB as they are stored, more once they are dequantized")
        raise


@dataclass(frozen=True)
class Eyes:
    """A checkpoint's processor and vision tower, loaded when the first image comes.

    Attributes:
        ranks: output of `convert`, whose tower is read instead of the checkpoint's; ranks share the images.
        device: of the tower.
    """

    checkpoint: Path
    config: KimiK2Config
    tokenizer: KimiTokenizer
    dtype: torch.dtype
    device: str | torch.device = "cpu"
    ranks: Path | None = None

    @cached_property
    def processor(self) -> MediaProcessor:
        """Raises MediaError for a member without a tower."""
        from kimi_k2.media.prompt import MediaProcessor

        return MediaProcessor.from_pretrained(self.checkpoint, self.tokenizer, self.config)

    @cached_property
    def encoder(self) -> VisionEncoder:
        """The tower, over all ranks if there are several."""
        import torch.distributed as dist

        from kimi_k2.engine.vision import VisionEncoder
        from kimi_k2.model.vision.model import VisionModel
        from kimi_k2.parallel.vision import data_parallel
        from kimi_k2.sharding.verify import verify_vision
        from kimi_k2.sharding.vision_file import VISION_FILE

        if self.ranks is None:
            return VisionEncoder(VisionModel.from_pretrained(self.checkpoint, dtype=self.dtype, device=self.device))
        verify_vision(self.ranks)
        model = VisionModel.from_file(self.ranks / VISION_FILE, self.config, dtype=self.dtype, device=self.device)
        return data_parallel(model) if dist.is_initialized() else VisionEncoder(model)
