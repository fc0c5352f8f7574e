"""MLA decode attention over an e4m3 cache with rounded queries and weights, against float64 and through the table.

Needs a Hopper GPU and nvcc.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from kimi_k2.bench.kernels.mla_cases import LENGTHS, SCALE, paged_case, reference, relative
from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention.mla_decode import folding, mla_decode, request_lengths
from kimi_k2.kernels.attention.mla_plan import mla_plan
from kimi_k2.kernels.attention.mla_sizes import HEADS, LATENT, PAGE
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.ops import mla as ops_mla
from kimi_k2.ops import registry

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER or find_nvcc() is None, reason="needs a Hopper GPU, nvcc")]
E4M3 = torch.float8_e4m3fn
# Three bits of queries and weights, as FlashMLA's own tests allow; BF16 results and no other rounding.
ROUNDED, EXACT = 0.06, 4e-3


def plan_of(seq_lens: Tensor, capacity: int, heads: int) -> Tensor:
    plan: Tensor = mla_plan(seq_lens, capacity, heads, True, True)
    return plan


def exact_case(lengths: Sequence[int], rows: Tensor, cache: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, float]:
    """Queries [*shape, 576] and a scale for which e4m3 holds queries and weights.

    Head h sees rotated key h alone, one of 0, -1, -2, -3 (as `rows` and `cache` then say), so that its weights are
    powers of two.
    """
    for keys in (rows, cache):
        size = (keys[..., LATENT:].float() * 1.5).abs().clamp_max(3).floor()
        keys[..., LATENT:] = torch.where(keys[..., LATENT:].float().isnan(), torch.nan, -size).to(E4M3)
    q = torch.zeros(*shape, 576, device=rows.device, dtype=torch.bfloat16)
    for head in range(shape[-1]):
        q[..., head, LATENT + head] = 1 + head % 2
    return q, math.log(2)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} to {max(lengths)}")
@pytest.mark.parametrize("heads", HEADS)
def test_against_float64(lengths: Sequence[int], heads: int) -> None:
    """Within what three bits allow; to BF16's bits where three bits hold queries and weights; the same bits again."""
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, min(8192, 2**19 // len(lengths)))
    rows, cache = rows.to(E4M3), cache.to(E4M3)
    plan = plan_of(seq_lens, table.shape[1] * PAGE, heads)
    empty = seq_lens == 0

    def check(q: Tensor, scale: float, error: float) -> None:
        found = mla_decode(q, rows, seq_lens, scale, None, 0.5, plan, rounded=True)
        assert found.isfinite().all() and not found[empty].any()
        for given, pages in ((rows, None), (cache, table), (cache, table)):
            again = plan_of(seq_lens, table.shape[1] * PAGE, heads)
            assert torch.equal(mla_decode(q, given, seq_lens, scale, pages, 0.5, again, rounded=True), found)
        if not empty.all():
            assert relative(found, reference(q, rows.float() * 0.5, lengths, scale)) < error

    check(q, SCALE, ROUNDED)
    q, scale = exact_case(lengths, rows, cache, (len(lengths), heads))
    check(q, scale * 2, EXACT)


@pytest.mark.parametrize("tokens", [2, 3, 4, 8])
@pytest.mark.parametrize("heads", HEADS)
def test_several_queries_a_sequence(tokens: int, heads: int) -> None:
    """Each token sees one row more than the one before it; the first ones of short sequences see none."""
    lengths = [3000, 64, 65, 70, 3, 0, 1, 1000, 128]
    _, rows, cache, _, seq_lens = paged_case(lengths, heads, 3072, seed=tokens)
    rows, cache = rows.to(E4M3), cache.to(E4M3)
    q, scale = exact_case(lengths, rows, cache, (len(lengths), tokens, heads))
    plan = plan_of(request_lengths(seq_lens, tokens, heads), 3072, folding(tokens, heads).rows)
    found = mla_decode(q, rows, seq_lens, scale, plan=plan, rounded=True)
    for token in range(tokens):
        seen = [max(0, length - (tokens - 1 - token)) for length in lengths]
        assert not found[torch.tensor(seen, device="cuda") == 0, token].any()
        assert relative(found[:, token], reference(q[:, token], rows.float(), seen, scale)) < EXACT


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("batch", [3, 140])
@pytest.mark.parametrize("capacity", [64, 256])
def test_short_contexts_without_a_merge(capacity: int, batch: int, heads: int) -> None:
    lengths = [(i * 37) % (capacity + 1) for i in range(batch)]
    _, rows, cache, table, seq_lens = paged_case(lengths, heads, capacity)
    rows, cache = rows.to(E4M3), cache.to(E4M3)
    q, scale = exact_case(lengths, rows, cache, (batch, heads))
    found = mla_decode(q, cache, seq_lens, scale, table, plan=plan_of(seq_lens, capacity, heads), rounded=True)
    assert relative(found, reference(q, rows.float(), lengths, scale)) < EXACT
    assert not found[seq_lens == 0].any()


@pytest.mark.parametrize("size", [2.0**-60, 2.0**60])
def test_queries_of_any_size(size: float) -> None:
    lengths = [700, 64, 3000]
    q, rows, _, _, seq_lens = paged_case(lengths, 64, 3072)
    rows, q = rows.to(E4M3), q * size
    found = mla_decode(q, rows, seq_lens, SCALE / size, plan=plan_of(seq_lens, 3072, 64), rounded=True)
    assert relative(found, reference(q, rows.float(), lengths, SCALE / size)) < ROUNDED


def test_a_negative_scale_is_refused() -> None:
    q, rows, _, _, seq_lens = paged_case([700], 8, 1024)
    with pytest.raises(KernelError, match="positive"):
        mla_decode(q, rows.to(E4M3), seq_lens, -SCALE, plan=plan_of(seq_lens, 1024, 8), rounded=True)


@pytest.fixture
def pinned() -> Iterator[None]:
    registry.pin("mla_decode=e4m3")
    yield
    registry.pin("")


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
@pytest.mark.parametrize("heads", [8, 64])
def test_through_the_table(heads: int, dtype: torch.dtype) -> None:
    """Pages, one piece, and a graph whose lengths change; a BF16 cache is served as ever."""
    lengths, error = [8192, 1, 64, 65, 5000, 127] * 3, ROUNDED if dtype == E4M3 else EXACT
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, min(8192, 2**19 // len(lengths)))
    rows, cache = rows.to(dtype), cache.to(dtype)

    def paged() -> Tensor:
        plan = ops_mla.attention_plan(seq_lens, cache, heads, table)
        return ops_mla.mla_decode(q, cache, seq_lens, SCALE, LATENT, plan, table)

    wanted, found = reference(q, rows.float(), lengths), paged()
    assert relative(found, wanted) < error
    assert (relative(found, wanted) > EXACT) == (dtype == E4M3)
    plan = ops_mla.attention_plan(seq_lens, rows, heads)
    assert torch.equal(ops_mla.mla_decode(q, rows, seq_lens, SCALE, LATENT, plan), found)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = paged()
    shorter = [1 + length // 2 for length in lengths]
    seq_lens.copy_(torch.tensor(shorter, dtype=torch.int32))
    graph.replay()
    assert relative(replayed, reference(q, rows.float(), shorter)) < error
