"""What a server is to answer: greedy tokens of the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from adapters import merge

from kimi_k2.api import KimiK2, Prompt
from kimi_k2.engine.generate import Generator, generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.engine.vision import MediaRows, VisionEncoder
from kimi_k2.model.decoder import KimiK2ForCausalLM


def expected(
    directory: Path, dtype: str, job: list[dict[str, Any]], cache: torch.dtype | None = None
) -> list[list[int]]:
    """Greedy tokens of the plain model, each request alone, with its adapter merged; a cache of its own dtype."""
    wanted: dict[int, list[int]] = {}
    for adapter in {tuple(request.get("adapter") or ()) for request in job}:
        model = KimiK2ForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
        model.kv_cache_dtype = cache or model.kv_cache_dtype
        if adapter:
            merge(model, Path(adapter[1]))
        for number, request in enumerate(job):
            if tuple(request.get("adapter") or ()) == adapter:
                params = SamplingParams(request["new_tokens"], ignore_eos=True)
                wanted[number] = generate(model, [request["prompt"]], params)[0]
    return [wanted[number] for number in range(len(job))]


def parts(model: KimiK2) -> tuple[KimiK2ForCausalLM, VisionEncoder]:
    """The language model, and what encodes images."""
    assert isinstance(model.generator, Generator) and model.media_reader is not None
    return model.generator.model, model.media_reader.encoder


def media_rows(model: KimiK2, prompts: Sequence[Prompt]) -> MediaRows | None:
    """Embeddings of a batch's images and videos."""
    return parts(model)[1].rows([prompt.ids for prompt in prompts], [prompt.media for prompt in prompts])


def answers(model: KimiK2, prompts: Sequence[Prompt], params: SamplingParams) -> list[list[int]]:
    """New tokens of a batch whose prompts may have images and videos."""
    ids = [prompt.ids for prompt in prompts]
    return generate(parts(model)[0], ids, params, media=lambda: media_rows(model, prompts))
