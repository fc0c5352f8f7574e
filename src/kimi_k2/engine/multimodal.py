"""K2.5 as what it is: conversations with images and videos, from messages to tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from kimi_k2.engine.generate import GenerationOutput, generate, stream
from kimi_k2.engine.sampler import SamplingParams, Step
from kimi_k2.engine.vision import MediaRows, VisionEncoder
from kimi_k2.media.patches import Media
from kimi_k2.media.prompt import MediaProcessor, MediaPrompt
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.tokenization.messages import Message


class MultimodalModel:
    """Language model, vision tower and processor of one checkpoint.

    Attributes:
        language_model: the decoder; it knows nothing of images.
        encoder: the tower, with a cache of embeddings by content.
        processor: reads media and makes prompts.
    """

    def __init__(self, language_model: KimiK2ForCausalLM, encoder: VisionEncoder, processor: MediaProcessor) -> None:
        self.language_model, self.encoder, self.processor = language_model, encoder, processor

    @classmethod
    def from_pretrained(
        cls,
        directory: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        keep_quantized: bool = False,
        on_tensor: Callable[[str, int], None] | None = None,
    ) -> MultimodalModel:
        """Read a whole checkpoint; arguments and errors as for KimiK2ForCausalLM, VisionModel and MediaProcessor."""
        processor = MediaProcessor.from_pretrained(directory)
        tower = VisionModel.from_pretrained(directory, dtype=dtype, device=device, on_tensor=on_tensor)
        decoder = KimiK2ForCausalLM.from_pretrained(
            directory, dtype=dtype, device=device, keep_quantized=keep_quantized, on_tensor=on_tensor
        )
        return cls(decoder, VisionEncoder(tower), processor)

    def prompt(self, messages: Sequence[Message], **options: Any) -> MediaPrompt:
        """See `MediaProcessor.__call__`."""
        return self.processor(messages, **options)

    def rows(self, prompts: Sequence[MediaPrompt]) -> MediaRows | None:
        """Embeddings of a batch's images and videos, None if it has none."""
        return encoded_rows(self.encoder, prompts)

    def stream(self, prompts: Sequence[MediaPrompt], params: SamplingParams, **options: Any) -> Iterator[Step]:
        """`engine.generate.stream` of prompts with media."""
        ids = [prompt.ids for prompt in prompts]
        return stream(self.language_model, ids, params, media=self.rows(prompts), **options)

    def generate(self, prompts: Sequence[MediaPrompt], params: SamplingParams, **options: Any) -> GenerationOutput:
        """`engine.generate.generate` of prompts with media."""
        ids = [prompt.ids for prompt in prompts]
        return generate(self.language_model, ids, params, media=self.rows(prompts), **options)


class HasMedia(Protocol):
    """A prompt: its token ids, and its images and video chunks in the order of their tokens."""

    @property
    def ids(self) -> list[int]:
        """Token ids."""

    @property
    def media(self) -> tuple[Media, ...]:
        """Images and video chunks."""


def encoded_rows(encoder: VisionEncoder, prompts: Sequence[HasMedia]) -> MediaRows | None:
    """Embeddings of all prompts' media, one call of the encoder for all.

    Raises:
        MediaError: a prompt's media tokens are not those of its images and videos.
    """
    done = iter(encoder.encode([one for prompt in prompts for one in prompt.media]))
    features = [[next(done) for _ in prompt.media] for prompt in prompts]
    return MediaRows.of([prompt.ids for prompt in prompts], features, encoder.config.media_token_ids)
