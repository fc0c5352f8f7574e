"""What vLLM says of a step, as our layers read it, and what they say of their caches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import needs
import pytest
import torch

from kimi_k2.engine import batch
from kimi_k2.engine.batch import Chunk

needs.engine("vllm")

PAGE = 4


@pytest.mark.parametrize("bound", [True, False], ids=["host's copy", "device's"])
def test_what_the_runner_says_of_a_step(bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decodes, then two prompts; behind them what the runner's buffers hold of other steps."""
    from kimi_k2.serving.vllm.attention import BatchBuilder

    starts, lengths = torch.tensor([0, 1, 2, 4, 8]).int(), torch.tensor([7, 30, 12, 4, 99]).int()
    common = SimpleNamespace(
        num_reqs=4, max_query_len=4, num_actual_tokens=8, query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=lengths, block_table_tensor=torch.zeros(4, 8).int(), slot_mapping=torch.arange(8), is_prefilling=None,
    )  # fmt: skip
    if bound:
        common.seq_lens_cpu_upper_bound, common.seq_lens = lengths, lengths.flip(0)
    monkeypatch.setattr(batch, "MOST_SLOTS", 0)  # prompts one by one
    builder = BatchBuilder.__new__(BatchBuilder)
    builder.kv_cache_spec = SimpleNamespace(block_size=PAGE)
    made = builder.build(0, common)
    found = [(one.rows, one.sequences, one.length) for one in made.chunks if isinstance(one, Chunk)]
    assert (made.decodes, made.tokens) == (2, 8)
    assert found == [(slice(2, 4), slice(2, 3), 12), (slice(4, 8), slice(3, 4), 4)]


def test_a_step_of_decodes_alone_reads_nothing_back() -> None:
    from kimi_k2.serving.vllm.attention import BatchBuilder

    starts = torch.arange(5).int()
    common = SimpleNamespace(
        num_reqs=4, max_query_len=1, num_actual_tokens=4, query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=None, block_table_tensor=torch.zeros(4, 8).int(), slot_mapping=torch.arange(4), is_prefilling=None,
    )  # fmt: skip
    made = BatchBuilder.__new__(BatchBuilder).build(0, common)
    assert (made.decodes, made.tokens, made.chunks) == (4, 4, ())


def test_lengths_of_what_a_rank_holds() -> None:
    """As vLLM counts them; a step of decodes alone has vLLM's own, for its graphs."""
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    from kimi_k2.serving.vllm.attention import BatchBuilder
    from kimi_k2.serving.vllm.ranks import ContextRanks

    lengths = torch.arange(70).int()
    for ranks, run, rank in ((2, 1, 0), (2, 1, 1), (8, 4, 5), (3, 16, 2)):
        spread = ContextRanks(ranks, rank, run, torch.clone, torch.clone)
        assert torch.equal(spread.held(lengths), get_dcp_local_seq_lens(lengths, ranks, rank, run).flatten())
    builder, starts = BatchBuilder.__new__(BatchBuilder), torch.arange(71).int()
    builder._spread, local = spread, lengths.flip(0)
    common = SimpleNamespace(
        num_reqs=70, max_query_len=1, num_actual_tokens=70, query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=lengths, block_table_tensor=torch.zeros(70, 8).int(), slot_mapping=torch.arange(70),
        is_prefilling=None, dcp_local_seq_lens=local,
    )  # fmt: skip
    assert builder.build(0, common).seq_lens is local and builder.build(0, common).spread is spread
    common.dcp_local_seq_lens = None
    assert torch.equal(builder.build(0, common).seq_lens, spread.held(lengths))


def held(name: str, entered: dict[str, Any]) -> Any:
    from kimi_k2.serving.vllm.attention import LatentAttention

    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=entered))
    return LatentAttention(config, name, cache_dim=3, dtype=torch.float32)


def test_a_layer_is_entered_once() -> None:
    entered: dict[str, Any] = {}
    assert held("one", entered) is entered["one"]
    with pytest.raises(ValueError, match="two layers are called one"):
        held("one", entered)


def test_the_cache_as_any_version_gives_it() -> None:
    layer, cache = held("one", {}), torch.randn(5, PAGE, 3)
    for given in (cache, [cache], (cache,), cache.unsqueeze(1), [cache.unsqueeze(1)]):
        layer.kv_cache = given
        assert layer.cache.shape == cache.shape
        assert layer.cache.data_ptr() == cache.data_ptr()


def test_the_batch_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One dictionary by layers' names, or a list of these; none while vLLM measures memory."""
    from kimi_k2.serving.vllm import attention

    layer, mine = held("one", {}), object()
    metadata: dict[str, object] = {"other": object(), "one": mine}
    for given, wanted in ((metadata, mine), ([metadata], mine), (None, None), ({}, None)):
        context = SimpleNamespace(attn_metadata=given)
        monkeypatch.setattr(attention, "get_forward_context", lambda context=context: context)
        assert layer.batch() is wanted


def test_what_the_backend_says_to_vllm() -> None:
    from kimi_k2.serving.vllm.attention import LatentAttention, LatentBackend

    layer = held("one", {})
    backend = layer.get_attn_backend()
    assert backend is LatentBackend
    assert backend.is_mla()
    assert backend.get_impl_cls() is LatentAttention
    spec = layer.get_kv_cache_spec(SimpleNamespace(cache_config=SimpleNamespace(block_size=64)))
    assert (spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype) == (64, 1, 3, torch.float32)
    assert backend.get_kv_cache_shape(7, 64, 1, 3) == (7, 64, 3)
