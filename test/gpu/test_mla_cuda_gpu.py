"""MLA decode attention against float64, every form of the kernel pinned and as chosen. Needs a Hopper GPU and nvcc."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kimi_k2.bench.kernels.mla_cases import SCALE, paged_case, reference, relative
from kimi_k2.kernels.attention import tuning
from kimi_k2.kernels.attention.mla_cuda import attend_parts, by_eights, choose_splits, run
from kimi_k2.kernels.attention.mla_decode import mla_decode, supports
from kimi_k2.kernels.attention.mla_sizes import CACHE_DTYPES, HEADS, PAGE
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.rowwise.decode import absorb_and_store

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER or find_nvcc() is None, reason="needs a Hopper GPU, nvcc")]
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


def test_the_operation_uses_this_kernel() -> None:
    q, _, cache, table, seq_lens = paged_case([77, 64], 64, 128)
    device = torch.cuda.get_device_properties(0)
    choice = tuning.choose(2, 64, table.shape[1] * PAGE, False, device.name, device.multi_processor_count)
    assert choice.splits, "short contexts are divided evenly"
    rows = q.view(-1, 8, 576) if choice.eights else q
    pinned = run(rows, cache, seq_lens, SCALE, table, choice.splits).view(*q.shape[:2], -1)
    assert torch.equal(mla_decode(q, cache, seq_lens, SCALE, table), pinned)


@pytest.mark.parametrize("heads", [16, 32, 64])
@pytest.mark.parametrize("lengths", [[1], [64, 0, 3], [500, 511]], ids=str)
def test_short_contexts_by_eights(heads: int, lengths: list[int]) -> None:
    """Every 8 heads are a request: with one part and with several."""
    capacity = -(-max(lengths) // PAGE) * PAGE
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, capacity)
    assert by_eights(len(lengths), heads, capacity)
    for dtype in (torch.bfloat16, torch.float8_e4m3fn):
        wanted = reference(q, rows.to(dtype).float(), lengths)
        found = mla_decode(q, cache.to(dtype), seq_lens, SCALE, table)
        assert relative(found, wanted) < RELATIVE
        assert torch.equal(mla_decode(q, rows.to(dtype), seq_lens, SCALE), found)
        assert not found[seq_lens == 0].any()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", [2.0**-8, 2.0**18])
def test_queries_of_any_size_over_e4m3(heads: int, size: float) -> None:
    """They become float16 there."""
    lengths = [700, 64, 3000]
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, 3072)
    q, cache, rows = q * size, cache.to(torch.float8_e4m3fn), rows.to(torch.float8_e4m3fn)
    found = run(q, cache, seq_lens, SCALE / size, table, 5)
    assert relative(found, reference(q, rows.float(), lengths, SCALE / size)) < RELATIVE


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 20, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_every_launch(heads: int, splits: int) -> None:
    lengths = [3000, 64, 0, 257, 1]
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, 4096)
    first = run(q, cache, seq_lens, SCALE, table, splits)
    assert first.isfinite().all()
    assert not first[2].any()
    assert relative(first, reference(q, rows, lengths)) < RELATIVE
    for _ in range(3):
        assert torch.equal(run(q, cache, seq_lens, SCALE, table, splits), first)


@pytest.mark.parametrize("splits", [2, 8, 64])
def test_parts_for_another_launch(splits: int) -> None:
    """Each normalised over its own rows, with the logarithm of its sum; 8 heads."""
    lengths = [3000, 70, 0]
    q, rows, *_, seq_lens = paged_case(lengths, 8, 3072)
    parts, sums = attend_parts(q, rows, seq_lens, SCALE, splits)
    shares = sums.double().exp2().nan_to_num(0)
    there = (sums > -torch.inf)[..., None]
    joined = torch.where(there, parts.double() * shares[..., None], 0.0).sum(2) / shares.sum(2, keepdim=True).clamp_min(
        1
    )
    assert not there[2].any()
    assert relative(joined, reference(q, rows, lengths)) < RELATIVE


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_e4m3_cache(lengths: list[int], heads: int) -> None:
    """NaN codes wherever no sequence has a row; one number of parts and the chosen one."""
    capacity, cache_scale = -(-max(lengths) // PAGE) * PAGE + 128, 0.05
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, capacity)
    rows, cache = ((tensor / cache_scale).to(torch.float8_e4m3fn) for tensor in (rows, cache))
    wanted = reference(q, rows.float() * cache_scale, lengths)
    for splits in (3, choose_splits(len(lengths), heads, capacity)):
        paged = run(q, cache, seq_lens, SCALE, table, splits, cache_scale)
        assert paged.isfinite().all()
        assert relative(paged, wanted) < RELATIVE
        for _ in range(3):
            assert torch.equal(run(q, rows, seq_lens, SCALE, None, splits, cache_scale), paged)


@pytest.mark.parametrize("heads", [8, 64])
def test_every_e4m3_code(heads: int) -> None:
    """Rows of one code each: the result is its value; NaN of a sequence's own stays NaN."""
    values = torch.arange(256, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    rows = values[:, None, None].expand(256, 70, 576).contiguous()
    q = torch.randn(256, heads, 576, device="cuda", dtype=torch.bfloat16) * 1e-3
    lengths = torch.full((256,), 70, dtype=torch.int32, device="cuda")
    out = run(q, rows, lengths, SCALE, None, 1, 0.5)
    wanted = (values.float() * 0.5)[:, None, None].expand_as(out)
    assert torch.equal(out.float().nan_to_num(7e4), wanted.nan_to_num(7e4))


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("size", [2.0**-60, 2.0**60])
def test_latents_of_any_size(heads: int, size: float) -> None:
    """Parts in float16 have a power of two of their own: neither lost nor infinite."""
    lengths = [2000, 900]
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, 2048)
    small, wide = q / size, cache * size
    out = run(small, wide, seq_lens, SCALE, table, 8)
    assert relative(out, reference(small, rows * size, lengths)) < RELATIVE


@pytest.mark.parametrize("heads", [8, 64])
def test_what_is_asked_for_ahead_is_only_a_hint(heads: int) -> None:
    """The launch just before writes lengths, pages and rows, which are read ahead of its end."""
    q, _, cache, table, seq_lens = paged_case([4000, 2000], heads, 4096)
    lengths = [4096, 1], [0, 3000], [64, 65]
    cases = [paged_case(both, heads, 4096, seed) for seed, both in enumerate(lengths)]
    wanted = [run(one[0], one[2], one[4], SCALE, one[3], 16) for one in cases]
    torch.cuda.synchronize()
    for _ in range(20):
        for case, result in zip(cases, wanted, strict=True):
            cache.copy_(case[2])
            q.copy_(case[0])
            table.copy_(case[3])
            seq_lens.copy_(case[4])
            assert torch.equal(run(q, cache, seq_lens, SCALE, table, 16), result)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)}x{max(lengths)}")
def test_paged_and_contiguous(lengths: list[int], heads: int) -> None:
    capacity = -(-max(lengths) // PAGE) * PAGE + 128
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, capacity)
    assert supports(q, cache, seq_lens, table)
    pinned, wanted = choose_splits(len(lengths), heads, capacity), reference(q, rows, lengths)
    for attend in (mla_decode, partial(run, splits=pinned)):
        paged = attend(q, cache, seq_lens, SCALE, table)
        assert paged.isfinite().all()
        assert relative(paged, wanted) < RELATIVE
        assert torch.equal(attend(q, rows, seq_lens, SCALE, None), paged)
        assert not paged[seq_lens == 0].any()


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("capacity", [1, 50, 1000])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_contiguous_cache_of_any_length(capacity: int, heads: int, dtype: torch.dtype) -> None:
    """Blocks that run into the next sequence, or past the tensor's end; lengths beyond the capacity."""
    torch.manual_seed(capacity)
    q = torch.randn(3, heads, 576, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(3, capacity, 576, device="cuda").to(dtype)
    lengths = [capacity, capacity + 1000, max(1, capacity - 7)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    out = run(q, rows, seq_lens, SCALE, None, choose_splits(3, heads, capacity))
    assert relative(out, reference(q, rows.float(), lengths)) < RELATIVE


@pytest.mark.parametrize("heads", [8, 64])
def test_writes_stay_inside(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated lies between guards, which are left as they were; so is the cache."""
    q, _, cache, table, seq_lens = paged_case([700, 0, 64], heads, 1024)
    before = cache.view(torch.int16).clone()
    guard, held = 4096, []

    def guarded(tensor: torch.Tensor, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        count = torch.Size(shape).numel()
        held.append(torch.full((count + 2 * guard,), 7.0, dtype=dtype or tensor.dtype, device=tensor.device))
        return held[-1][guard:-guard].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", guarded)
    for splits in (1, 5):
        run(q, cache, seq_lens, SCALE, table, splits)
    assert len(held) == 4
    assert all((one[:guard] == 7).all() and (one[-guard:] == 7).all() for one in held)
    assert torch.equal(cache.view(torch.int16), before)


@pytest.mark.parametrize("heads", [8, 64])
def test_sharp_scores(heads: int) -> None:
    """One row has nearly all the weight, in any part; scores of hundreds do not overflow."""
    q, rows, cache, table, seq_lens = paged_case([8000, 8192], heads, 8192)
    out = run(q, cache, seq_lens, 20.0, table, choose_splits(2, heads, 8192))
    assert out.isfinite().all()
    assert relative(out, reference(q, rows, [8000, 8192], 20.0)) < RELATIVE


@pytest.mark.parametrize("heads", [8, 64])
def test_graph_replay_follows_lengths_and_inputs(heads: int) -> None:
    q, rows, cache, table, seq_lens = paged_case([4096] * 5, heads, 4096)
    splits = choose_splits(5, heads, 4096)
    run(q, cache, seq_lens, SCALE, table, splits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(q * 2, cache, seq_lens, SCALE, table, splits)
    for lengths in ([1, 2, 3, 4, 5], [4096] * 5, [0, 4000, 64, 65, 1]):
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        q.normal_()
        graph.replay()
        assert torch.equal(out, run(q * 2, cache, seq_lens, SCALE, table, splits))
        assert relative(out, reference(q * 2, rows, lengths)) < RELATIVE


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.memory(6)
def test_offsets_beyond_32_bits(heads: int) -> None:
    pages = 2**31 // (PAGE * 576) + 100
    cache = torch.zeros(pages, PAGE, 576, device="cuda", dtype=torch.bfloat16)
    cache[-4:].normal_()
    q = torch.randn(1, heads, 576, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(pages - 4, pages, dtype=torch.int32, device="cuda").view(1, 4)
    lengths = torch.tensor([250], dtype=torch.int32, device="cuda")
    out = run(q, cache, lengths, SCALE, table, choose_splits(1, heads, 256))
    assert relative(out, reference(q, cache[-4:].reshape(1, 256, 576), [250])) < RELATIVE


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
