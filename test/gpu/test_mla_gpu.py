"""MLA decode attention against float64. Needs a Hopper GPU and nvcc."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.bench.kernels.mla_cases import SCALE, paged_case, reference, relative
from kimi_k2.kernels.attention.mla_decode import mla_decode, supports
from kimi_k2.kernels.attention.mla_sizes import HEADS, PAGE
from kimi_k2.kernels.rowwise.decode import absorb_and_store

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]
# BF16 results and weights: 2**-9 each, in the mean far below its maximum.
RELATIVE = 4e-3


LENGTHS = [
    [1],
    [8192],
    [63, 64, 65],
    [5000, 1, 0, 4097, 8192, 127, 300],
    [1000 + 77 * i for i in range(70)],
    [i % 3 for i in range(200)],
]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_matches_float64(lengths: list[int], heads: int) -> None:
    capacity = -(-max(lengths) // PAGE) * PAGE + 128
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, capacity)
    assert supports(q, cache, seq_lens, table)
    wanted = reference(q, rows, lengths)
    paged = mla_decode(q, cache, seq_lens, SCALE, table)
    assert paged.isfinite().all()
    assert relative(paged, wanted) < RELATIVE
    contiguous = mla_decode(q, rows, seq_lens, SCALE)
    assert torch.equal(contiguous, paged)
    empty = [one for one, length in enumerate(lengths) if not length]
    assert not paged[empty].any()


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("capacity", [1, 50, 1000])
def test_contiguous_cache_of_any_length(capacity: int, heads: int) -> None:
    torch.manual_seed(capacity)
    q = torch.randn(3, heads, 576, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(3, capacity, 576, device="cuda", dtype=torch.bfloat16)
    lengths = [capacity, capacity + 1000, max(1, capacity - 7)]
    out = mla_decode(q, rows, torch.tensor(lengths, dtype=torch.int32, device="cuda"), SCALE)
    assert relative(out, reference(q, rows, lengths)) < RELATIVE


@pytest.mark.parametrize("heads", [8, 64])
def test_sharp_scores(heads: int) -> None:
    """One row has nearly all the weight, in any part; scores of hundreds do not overflow."""
    q, rows, cache, table, seq_lens = paged_case([8000, 8192], heads, 8192)
    out = mla_decode(q, cache, seq_lens, 20.0, table)
    assert out.isfinite().all()
    assert relative(out, reference(q, rows, [8000, 8192], 20.0)) < RELATIVE


@pytest.mark.parametrize("heads", [8, 64])
def test_graph_replay_follows_lengths_and_inputs(heads: int) -> None:
    q, rows, cache, table, seq_lens = paged_case([4096] * 5, heads, 4096)
    mla_decode(q, cache, seq_lens, SCALE, table)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla_decode(q * 2, cache, seq_lens, SCALE, table)
    for lengths in ([1, 2, 3, 4, 5], [4096] * 5, [0, 4000, 64, 65, 1]):
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        q.normal_()
        graph.replay()
        assert torch.equal(out, mla_decode(q * 2, cache, seq_lens, SCALE, table))
        assert relative(out, reference(q * 2, rows, lengths)) < RELATIVE


@pytest.mark.parametrize("heads", [8, 64])
def test_offsets_beyond_32_bits(heads: int) -> None:
    pages = 2**31 // (PAGE * 576) + 100
    cache = torch.zeros(pages, PAGE, 576, device="cuda", dtype=torch.bfloat16)
    cache[-4:].normal_()
    q = torch.randn(1, heads, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(pages - 4, pages, dtype=torch.int32, device="cuda").view(1, 4)
    out = mla_decode(q, cache, torch.tensor([250], dtype=torch.int32, device="cuda"), SCALE, table)
    assert relative(out, reference(q, cache[-4:].reshape(1, 256, 576), [250])) < RELATIVE


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("paged", [True, False])
def test_e4m3_cache(heads: int, paged: bool) -> None:
    """Codes times one scale; NaN codes past a context's end."""
    lengths, cache_scale = [5000, 1, 0, 8192, 300], 0.05
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, 8192)
    rows, cache = ((t / cache_scale).to(torch.float8_e4m3fn) for t in (rows, cache))
    if paged:
        out = mla_decode(q, cache, seq_lens, SCALE, table, cache_scale)
    else:
        out = mla_decode(q, rows, seq_lens, SCALE, None, cache_scale)
    assert relative(out, reference(q, rows.float() * cache_scale, lengths)) < RELATIVE
    assert not out[2].any()


def test_e4m3_entries_of_the_step_before() -> None:
    """What `absorb_and_store` writes with a scale is PyTorch's rounding, saturated, and `mla_decode` reads it."""
    torch.manual_seed(0)
    batch, heads, capacity, cache_scale = 3, 8, 100, 0.02
    q, kv_a, w_uk = (
        torch.randn(*shape, device="cuda").bfloat16()
        for shape in ((batch, heads * 192), (batch, 576), (heads, 128, 512))
    )
    norm, cos, sin = (torch.rand(*shape, device="cuda").bfloat16() for shape in ((512,), (batch, 32), (batch, 32)))
    norm[:3] = 1000.0
    positions = torch.tensor([99, 40, 0], device="cuda")
    slots = positions + torch.arange(0, batch * capacity, capacity, device="cuda")
    exact = torch.randn(batch, capacity, 576, device="cuda").bfloat16()
    cache = (exact.float() / cache_scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    before = cache.float()
    absorb_and_store(q, kv_a, norm, cos, sin, slots, w_uk, exact, 1e-6)
    query = absorb_and_store(q, kv_a, norm, cos, sin, slots, w_uk, cache, 1e-6, cache_scale)
    rows = torch.arange(batch, device="cuda")
    wanted = (exact[rows, positions].float() / cache_scale).clamp(-448, 448)
    found = cache[rows, positions].float()
    # Half a step of e4m3, and the bfloat16 of what is compared with.
    assert ((found - wanted).abs() <= wanted.abs() * (2**-4 + 2**-7) + 2**-10).all()
    before[rows, positions] = found
    assert torch.equal(cache.float(), before)
    lengths = (positions + 1).tolist()
    out = mla_decode(query, cache, (positions + 1).int(), SCALE, None, cache_scale)
    assert relative(out, reference(query, cache.float() * cache_scale, lengths)) < RELATIVE
