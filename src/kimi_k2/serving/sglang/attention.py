"""Attention over SGLang's pool of cache entries: the backend that SGLang asks for, and a layer's part of the pool."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_context import get_attn_backend
from torch import Tensor

from kimi_k2.engine.batch import Batch


class PoolBackend(AttentionBackend):  # type: ignore[misc]  # SGLang has no types for mypy here
    """Says what a step computes; the model's layers attend by themselves.

    Args:
        runner: SGLang's, whose pools are there.
    """

    # Lengths of prompts come with them; those of decodes stay on the device.
    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        # Where SGLang looks for them, too.
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.page: int = runner.page_size
        self.batch: Batch | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The batch of a step that is launched kernel by kernel."""
        mode = forward_batch.forward_mode
        self.batch = self._decodes(forward_batch) if mode.is_decode() else self._prompts(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """SGLang is about to capture decodes of so many sequences at most: a batch is made of its own buffers."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """The batch of a captured step, made of SGLang's own buffers in each replay."""
        self.batch = self._decodes(forward_batch)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of the sequences that fill a captured size; they read and write entries that nobody owns."""
        return 1

    def cache(self, layer: int) -> Tensor:
        """[pages, slots a page, cache_dim] of a layer."""
        entries: Tensor = self.token_to_kv_pool.get_key_buffer(layer)
        return entries.view(-1, self.page, entries.shape[-1])

    def _table(self, forward_batch: Any, longest: int) -> Tensor:
        """int32 [B, P], pages of each sequence up to `longest` tokens."""
        entries: Tensor = self.req_to_token_pool.req_to_token[:, : longest : self.page]
        pages = entries[forward_batch.req_pool_indices]
        return pages if self.page == 1 else pages.div(self.page, rounding_mode="floor")

    def _decodes(self, forward_batch: Any) -> Batch:
        """Each sequence has one new token."""
        count = forward_batch.batch_size
        table = self._table(forward_batch, self.req_to_token_pool.req_to_token.shape[1])
        return Batch(count, count, forward_batch.seq_lens.int(), forward_batch.out_cache_loc, table)

    def _prompts(self, forward_batch: Any) -> Batch:
        """Prompts or parts of them; among them sequences with one new token may be."""
        new, before = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        lengths = [here + there for here, there in zip(new, before, strict=True)]
        ends = forward_batch.extend_seq_lens.cumsum(0, dtype=torch.int32)
        return Batch.of_sequences(
            [0, *accumulate(new)], torch.nn.functional.pad(ends, (1, 0)), forward_batch.seq_lens.int(), lengths,
            self._table(forward_batch, max(lengths)), forward_batch.out_cache_loc, self.page,
        )  # fmt: skip


class PoolCache:
    """A layer's part of the pool that the step's backend has.

    Args:
        layer: its number.
    """

    def __init__(self, layer: int) -> None:
        self.layer = layer

    @property
    def cache(self) -> Tensor:
        """[pages, slots a page, cache_dim]."""
        return _backend().cache(self.layer)

    def batch(self) -> Batch | None:
        """What this step computes."""
        return _backend().batch


def _backend() -> PoolBackend:
    backend = get_attn_backend()
    assert isinstance(backend, PoolBackend)
    return backend
