"""Caches that move between engines layer by layer: what vLLM's attention layers tell its connector, of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.model_executor.layers.attention.mla_attention import MLACommonMetadata

from kimi_k2.engine.batch import Batch

if TYPE_CHECKING:
    from kimi_k2.serving.vllm.attention import LatentAttention


class LatentBatch(Batch, MLACommonMetadata):  # type: ignore[misc]  # vLLM has no types for mypy here
    """A batch that connectors know as one of a cache with one entry a token; they look at nothing else of it."""


def move_caches(batch: Batch, held: Mapping[int, LatentAttention]) -> None:
    """Where vLLM has a connector: wait for each layer's cache before its attention, and hand it over behind.

    Args:
        batch: of the step.
        held: by the layer's number.
    """
    if not has_kv_transfer_group():
        return
    connector = get_kv_transfer_group()
    if not connector.has_connector_metadata():
        return

    def save(number: int) -> None:
        connector.save_kv_layer(held[number].name, held[number].kv_cache, batch)

    batch.before_attention = lambda number: connector.wait_for_layer_load(held[number].name)
    batch.after_attention = save
