"""MLA decode attention by a plan against float64: ragged lengths, graphs whose lengths change.

Needs a Hopper GPU and nvcc.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from kimi_k2.bench.kernels.mla_cases import LENGTHS, SCALE, paged_case, reference, relative
from kimi_k2.kernels.attention.mla_decode import folding, mla_decode, request_lengths
from kimi_k2.kernels.attention.mla_plan import mla_plan
from kimi_k2.kernels.attention.mla_sizes import CACHE_DTYPES, HEADS, PAGE
from kimi_k2.kernels.common.build import find_nvcc

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER or find_nvcc() is None, reason="needs a Hopper GPU, nvcc")]
# BF16 results and weights: 2**-9 each, in the mean far below its maximum.
RELATIVE = 4e-3


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} to {max(lengths)}")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("paged", [True, False])
def test_against_float64(lengths: Sequence[int], heads: int, paged: bool) -> None:
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, min(8192, 2**19 // len(lengths)))
    plan = mla_plan(seq_lens, table.shape[1] * PAGE, heads)
    given = (cache, seq_lens, SCALE, table) if paged else (rows, seq_lens, SCALE, None)
    found = mla_decode(q, *given, plan=plan)
    assert found.isfinite().all()
    wanted = reference(q, rows, lengths)
    empty = torch.tensor([length == 0 for length in lengths], device=q.device)
    assert not found[empty].any()
    if not empty.all():
        assert relative(found, wanted) < RELATIVE
    for _ in range(3):
        assert torch.equal(mla_decode(q, *given, plan=mla_plan(seq_lens, table.shape[1] * PAGE, heads)), found)


@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} to {max(lengths)}")
@pytest.mark.parametrize("heads", HEADS)
def test_e4m3_cache(lengths: Sequence[int], heads: int) -> None:
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, min(8192, 2**19 // len(lengths)))
    rows, cache = (tensor.to(torch.float8_e4m3fn) for tensor in (rows, cache))
    plan = mla_plan(seq_lens, rows.shape[1], heads, True)
    found = mla_decode(q, rows, seq_lens, SCALE, None, 0.5, plan)
    assert torch.equal(mla_decode(q, cache, seq_lens, SCALE, table, 0.5, plan), found)
    if any(lengths):
        assert relative(found, reference(q, rows.float() * 0.5, lengths)) < RELATIVE


@pytest.mark.parametrize("batch", [3, 140])
@pytest.mark.parametrize("capacity", [64, 128, 256])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_short_contexts_without_a_merge(dtype: torch.dtype, heads: int, capacity: int, batch: int) -> None:
    """Contexts without rows give zeros, which no merge writes."""
    draw = random.Random(capacity)
    lengths = [draw.choice((0, 1, capacity, draw.randrange(capacity))) for _ in range(batch)]
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, capacity)
    plan = mla_plan(seq_lens, capacity, heads, dtype != torch.bfloat16)
    found = mla_decode(q, cache.to(dtype), seq_lens, SCALE, table, plan=plan)
    assert relative(found, reference(q, rows.to(dtype).float(), lengths)) < RELATIVE
    assert not found[seq_lens == 0].any()
    assert torch.equal(mla_decode(q, rows.to(dtype), seq_lens, SCALE, plan=plan), found)


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_several_queries_a_sequence(tokens: int, heads: int, dtype: torch.dtype) -> None:
    """Each token sees one row more than the one before it; the first ones of short sequences see none."""
    lengths = [3000, 64, 65, 70, 3, 0, 1, 1000, 128]
    _, rows, cache, table, seq_lens = paged_case(lengths, heads, 3072, seed=tokens)
    q = torch.randn(len(lengths), tokens, heads, 576, device="cuda", dtype=torch.bfloat16)
    rows, cache = rows.to(dtype), cache.to(dtype)
    requests, together = request_lengths(seq_lens, tokens, heads), folding(tokens, heads).rows
    plan = mla_plan(requests, 3072, together, dtype != torch.bfloat16)
    found = mla_decode(q, cache, seq_lens, SCALE, table, plan=plan)
    assert found.shape == (len(lengths), tokens, heads, 512) and found.isfinite().all()
    for given in (None, plan):
        assert relative(mla_decode(q, rows, seq_lens, SCALE, plan=given), found.double()) < 1e-2
    for token in range(tokens):
        seen = [max(0, length - (tokens - 1 - token)) for length in lengths]
        wanted = reference(q[:, token], rows.float(), seen)
        assert not found[torch.tensor(seen, device="cuda") == 0, token].any()
        assert relative(found[:, token], wanted) < RELATIVE
        assert relative(mla_decode(q, rows, seq_lens, SCALE)[:, token], wanted) < RELATIVE


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_a_part_has_the_same_bits_wherever_it_is_taken(heads: int, dtype: torch.dtype) -> None:
    """Items moved to other blocks, behind other items and alone: only who computes a part changes, not the part."""
    lengths = [640, 65, 3000, 64, 1, 1300, 129, 4000]
    q, rows, *_, seq_lens = paged_case(lengths, heads, 4096)
    rows = rows.to(dtype)
    plan = mla_plan(seq_lens, 4096, heads, dtype != torch.bfloat16)
    found = mla_decode(q, rows, seq_lens, SCALE, plan=plan)
    batch = len(lengths)
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    firsts = plan[2 * batch :].view(-1)
    items = int(firsts[blocks])
    for block in (1, 5, 50):  # this many blocks take all items
        moved = plan.clone()
        places = [min(items, -(-items * one // block)) if one < block else items for one in range(blocks + 1)]
        moved[2 * batch :].view(-1)[: blocks + 1] = torch.tensor(places, dtype=torch.int32)
        assert torch.equal(mla_decode(q, rows, seq_lens, SCALE, plan=moved), found)


@pytest.mark.parametrize("lengths", [*LENGTHS, [0], [64, 0, 3], [i * 37 % 257 for i in range(140)]], ids=len)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("planned", [True, False])
@pytest.mark.memory(8)
def test_logarithms_of_sums(lengths: Sequence[int], heads: int, dtype: torch.dtype, planned: bool) -> None:
    """Float64's; the results have the same bits as without them.

    By a plan over e4m3, FP8's tensor cores drop what lies 2**-14 below a sum, at each of a score's 36 steps.
    """
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, -(-max(*lengths, 1) // PAGE) * PAGE)
    rows, cache = rows.to(dtype), cache.to(dtype)
    hidden = torch.arange(rows.shape[1], device="cuda") >= seq_lens[:, None]
    keys = rows.double().masked_fill(hidden.unsqueeze(-1), 0)
    wanted = (q.double() @ keys.mT * SCALE).masked_fill(hidden[:, None], -torch.inf).logsumexp(-1)
    fp8 = dtype != torch.bfloat16
    plan = mla_plan(seq_lens, table.shape[1] * PAGE, heads, fp8) if planned else None
    for given in ((cache, seq_lens, SCALE, table), (rows, seq_lens, SCALE, None)):
        lse = torch.full((len(lengths), heads), torch.nan, device="cuda")
        found = mla_decode(q, *given, plan=plan, lse=lse)
        assert torch.equal(found, mla_decode(q, *given, plan=plan))
        rtol, atol = (2.0**-9, 5e-3) if fp8 and planned else (1e-5, 1e-4)
        torch.testing.assert_close(lse.double(), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("heads", [8, 64])
def test_a_graph_follows_the_lengths(heads: int) -> None:
    draw = random.Random(heads)
    q, rows, _, _, seq_lens = paged_case([2048] * 64, heads, 2048)
    mla_decode(q, rows, seq_lens, SCALE, plan=mla_plan(seq_lens, 2048, heads))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan = mla_plan(seq_lens, 2048, heads)
        found = [mla_decode(q, rows, seq_lens, SCALE, plan=plan) for _ in range(3)]
    for _ in range(5):
        lengths = [draw.choice((0, 1, 64, 2048, draw.randrange(2048))) for _ in range(64)]
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        wanted = reference(q, rows, lengths)
        assert all(relative(one, wanted) < RELATIVE for one in found)
        assert all(torch.equal(one, found[0]) for one in found)
