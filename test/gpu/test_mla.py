"""MLA decode attention against float64: every way to share the work out, both caches, in pages and in one piece."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from exact import E4M3, distance
from on_hopper import NEEDS_HOPPER
from paged import LENGTHS, SCALE, paged_case, reference
from torch import Tensor

from kimi_k2.kernels.attention.mla_cuda import capacity_of, choose_splits, run
from kimi_k2.kernels.attention.mla_decode import folding, mla_decode, request_lengths
from kimi_k2.kernels.attention.mla_plan import mla_plan
from kimi_k2.kernels.attention.mla_sizes import CACHE_DTYPES, HEADS, LATENT, PAGE
from kimi_k2.ops import mla as ops_mla
from kimi_k2.ops import registry

pytestmark = NEEDS_HOPPER
BF16 = torch.bfloat16
# BF16 results and weights: 2**-9 each, in the mean far below its maximum. Three bits of queries and weights, as
# FlashMLA's own tests allow.
EXACT, ROUNDED = 4e-3, 0.06
HALF = 0.5  # an e4m3 cache's scale


def attend(
    form: str, q: Tensor, cache: Tensor, seq_lens: Tensor, table: Tensor | None = None, scale: float = SCALE,
    cache_scale: float = 1.0, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`even`, `plan`, `rounded`, or `split N`, which pins the parts; without N as chosen for the shapes."""
    heads, capacity, plan = q.shape[-2], capacity_of(cache, table), None
    if form.startswith("split"):
        splits = int(form[5:] or choose_splits(len(q), capacity))
        return run(q, cache, seq_lens, scale, table, splits, cache_scale, lse=lse)
    if form != "even":
        tokens = q.shape[1] if q.dim() == 4 else 1
        requests, together = request_lengths(seq_lens, tokens, heads), folding(tokens, heads).rows
        plan = mla_plan(requests, capacity, together, cache.dtype != BF16, form == "rounded")
    out: Tensor = mla_decode(q, cache, seq_lens, scale, table, cache_scale, plan, form == "rounded", lse)
    return out


def exact_case(rows: Tensor, cache: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, float]:
    """Queries [*shape, 576] and a scale for which e4m3 holds queries and weights.

    Head h sees rotated key h alone, one of 0, -1, -2, -3 (as `rows` and `cache` then say), so that its weights are
    powers of two.
    """
    for keys in (rows, cache):
        size = (keys[..., LATENT:].float() * 1.5).abs().clamp_max(3).floor()
        keys[..., LATENT:] = torch.where(keys[..., LATENT:].float().isnan(), torch.nan, -size).to(E4M3)
    q = torch.zeros(*shape, 576, device=rows.device, dtype=BF16)
    for head in range(shape[-1]):
        q[..., head, LATENT + head] = 1 + head % 2
    return q, math.log(2) / HALF


def short(capacity: int, batch: int) -> list[int]:
    draw = random.Random(capacity)
    return [draw.choice((0, 1, capacity, draw.randrange(capacity))) for _ in range(batch)]


# Contexts, and the capacity of their cache.
WIDE = [(lengths, min(8192, 2**19 // len(lengths))) for lengths in LENGTHS]
SHORT = [(short(capacity, batch), capacity) for capacity in (64, 128, 256) for batch in (3, 140)]
EIGHTS = [([1], 64), ([64, 0, 3], 64), ([500, 511], 512)]
SPLIT = [f"split {splits}" for splits in (1, 2, 3, 7, 20, 128)]
ROWS = [
    *((form, dtype, *case)
      for form, dtype, case in product(("plan", "even", "split"), CACHE_DTYPES, WIDE + SHORT + EIGHTS)),
    *((form, dtype, [3000, 64, 0, 257, 1], 4096) for form, dtype in product(SPLIT, CACHE_DTYPES)),
    *((form, E4M3, *case) for form, case in product(("rounded", "rounded exactly"), WIDE + SHORT)),
]  # fmt: skip


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("form", "dtype", "lengths", "capacity"),
    ROWS,
    ids=lambda one: f"{len(one)} to {max(one)}" if isinstance(one, list) else str(one),
)
def test_decode(form: str, dtype: torch.dtype, lengths: list[int], capacity: int, heads: int) -> None:
    """The same bits in pages and in one piece, and again by a plan made anew; NaN wherever no sequence has a row."""
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, capacity)
    rows, cache, scale, cache_scale = rows.to(dtype), cache.to(dtype), SCALE, HALF if dtype == E4M3 else 1.0
    assert mla_decode.takes(q, cache, seq_lens, SCALE, table)
    if form == "rounded exactly":
        q, scale = exact_case(rows, cache, (len(lengths), heads))
    form, empty = form.split()[0] if "exactly" in form else form, seq_lens == 0
    found = attend(form, q, cache, seq_lens, table, scale, cache_scale)
    assert found.isfinite().all() and not found[empty].any()
    for given, pages in ((rows, None), (cache, table), (cache, table)):
        assert torch.equal(attend(form, q, given, seq_lens, pages, scale, cache_scale), found)
    if not empty.all():
        error = ROUNDED if form == "rounded" and scale == SCALE else EXACT
        exact = rows if dtype == BF16 else rows.float() * cache_scale
        assert distance(found, reference(q, exact, lengths, scale)) < error


@pytest.mark.parametrize("tokens", range(1, 9))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("form", "dtype"), [*product(("even", "plan"), CACHE_DTYPES), ("rounded", E4M3)])
def test_several_queries_a_sequence(tokens: int, heads: int, form: str, dtype: torch.dtype) -> None:
    """Each token sees one row more than the one before it; the first ones of short sequences see none."""
    lengths = [3000, 64, 65, 70, 3, 0, 1, 1000, 128]
    _, rows, cache, table, seq_lens = paged_case(lengths, heads, 3072, seed=tokens)
    q, scale = torch.randn(len(lengths), tokens, heads, 576, device="cuda", dtype=BF16), SCALE
    rows, cache = rows.to(dtype), cache.to(dtype)
    if form == "rounded":
        q, scale = exact_case(rows, cache, (len(lengths), tokens, heads))
        scale *= HALF
    found = attend(form, q, cache, seq_lens, table, scale)
    assert found.shape == (len(lengths), tokens, heads, 512) and found.isfinite().all()
    assert distance(attend(form, q, rows, seq_lens, None, scale), found.double()) < 1e-2
    for token in range(tokens):
        seen = [max(0, length - (tokens - 1 - token)) for length in lengths]
        assert not found[torch.tensor(seen, device="cuda") == 0, token].any()
        assert distance(found[:, token], reference(q[:, token], rows.float(), seen, scale)) < EXACT


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_a_part_has_the_same_bits_wherever_it_is_taken(heads: int, dtype: torch.dtype) -> None:
    """Items moved to other blocks, behind other items and alone: only who computes a part changes, not the part."""
    lengths = [640, 65, 3000, 64, 1, 1300, 129, 4000]
    q, rows, *_, seq_lens = paged_case(lengths, heads, 4096)
    rows, batch = rows.to(dtype), len(lengths)
    plan = mla_plan(seq_lens, 4096, heads, dtype != BF16)
    found = mla_decode(q, rows, seq_lens, SCALE, plan=plan)
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
@pytest.mark.parametrize("form", ["plan", "even"])
@pytest.mark.memory(8)
def test_logarithms_of_sums(lengths: Sequence[int], heads: int, dtype: torch.dtype, form: str) -> None:
    """Float64's; the results have the same bits as without them.

    By a plan over e4m3, FP8's tensor cores drop what lies 2**-14 below a sum, at each of a score's 36 steps.
    """
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, -(-max(*lengths, 1) // PAGE) * PAGE)
    rows, cache = rows.to(dtype), cache.to(dtype)
    hidden = torch.arange(rows.shape[1], device="cuda") >= seq_lens[:, None]
    keys = rows.double().masked_fill(hidden.unsqueeze(-1), 0)
    wanted = (q.double() @ keys.mT * SCALE).masked_fill(hidden[:, None], -torch.inf).logsumexp(-1)
    rtol, atol = (2.0**-9, 5e-3) if dtype != BF16 and form == "plan" else (1e-5, 1e-4)
    for given, pages in ((cache, table), (rows, None)):
        lse = torch.full((len(lengths), heads), torch.nan, device="cuda")
        assert torch.equal(attend(form, q, given, seq_lens, pages, lse=lse), attend(form, q, given, seq_lens, pages))
        torch.testing.assert_close(lse.double(), wanted, rtol=rtol, atol=atol)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize(("form", "dtype"), [("split", BF16), ("plan", BF16), ("even", E4M3), ("rounded", E4M3)])
def test_a_graph_follows_the_lengths(heads: int, form: str, dtype: torch.dtype) -> None:
    """And the queries; three in a row are alike."""
    draw = random.Random(heads)
    q, rows, _, _, seq_lens = paged_case([2048] * 64, heads, 2048)
    rows = rows.to(dtype)
    attend(form, q, rows, seq_lens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [attend(form, q * 2, rows, seq_lens) for _ in range(3)]
    for _ in range(5):
        lengths = [draw.choice((0, 1, 64, 2048, draw.randrange(2048))) for _ in range(64)]
        seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        q.normal_()
        graph.replay()
        torch.cuda.synchronize()
        error = distance(found[0], reference(q * 2, rows.float(), lengths))
        assert error < (ROUNDED if form == "rounded" else EXACT)
        assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize(("form", "dtype", "query", "entry"), [
    *(("split 5", E4M3, size, 1.0) for size in (2.0**-8, 2.0**18)),  # queries become float16 there
    *(("rounded", E4M3, size, 1.0) for size in (2.0**-60, 2.0**60)),
    # Parts in float16 have a power of two of their own: neither lost nor infinite.
    *(("split 8", BF16, 1 / size, size) for size in (2.0**-60, 2.0**60)),
])  # fmt: skip
def test_values_of_any_size(form: str, dtype: torch.dtype, query: float, entry: float, heads: int) -> None:
    lengths = [700, 64, 3000]
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, 3072)
    q, rows, cache, scale = q * query, (rows * entry).to(dtype), (cache * entry).to(dtype), SCALE / (query * entry)
    found = attend(form, q, cache, seq_lens, table, scale)
    assert distance(found, reference(q, rows.float(), lengths, scale)) < (ROUNDED if form == "rounded" else EXACT)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
@pytest.mark.parametrize("heads", [8, 64])
def test_through_the_table(heads: int, dtype: torch.dtype) -> None:
    """As pinned, over pages and one piece; a BF16 cache is served as ever."""
    lengths = [8192, 1, 64, 65, 5000, 127] * 3
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, min(8192, 2**19 // len(lengths)))
    rows, cache = rows.to(dtype), cache.to(dtype)
    registry.pin("mla_decode=e4m3")
    plan = ops_mla.attention_plan(seq_lens, cache, heads, table)
    found = ops_mla.mla_decode(q, cache, seq_lens, SCALE, LATENT, plan, table)
    plan = ops_mla.attention_plan(seq_lens, rows, heads)
    assert torch.equal(ops_mla.mla_decode(q, rows, seq_lens, SCALE, LATENT, plan), found)
    registry.pin("")
    form = "even" if plan is None else "rounded" if dtype == E4M3 else "plan"
    assert form != "even" or dtype == BF16
    assert torch.equal(found, attend(form, q, cache, seq_lens, table))


@pytest.mark.parametrize("heads", [8, 64])
def test_every_e4m3_code(heads: int) -> None:
    """Rows of one code each: the result is its value; NaN of a sequence's own stays NaN."""
    values = torch.arange(256, dtype=torch.uint8, device="cuda").view(E4M3)
    rows = values[:, None, None].expand(256, 70, 576).contiguous()
    q = torch.randn(256, heads, 576, device="cuda", dtype=BF16) * 1e-3
    lengths = torch.full((256,), 70, dtype=torch.int32, device="cuda")
    out = run(q, rows, lengths, SCALE, None, 1, 0.5)
    wanted = (values.float() * 0.5)[:, None, None].expand_as(out)
    assert torch.equal(out.float().nan_to_num(7e4), wanted.nan_to_num(7e4))


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
            for old, new in ((cache, case[2]), (q, case[0]), (table, case[3]), (seq_lens, case[4])):
                old.copy_(new)
            assert torch.equal(run(q, cache, seq_lens, SCALE, table, 16), result)


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("capacity", [1, 50, 1000])
@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_contiguous_cache_of_any_length(capacity: int, heads: int, dtype: torch.dtype) -> None:
    """Blocks that run into the next sequence, or past the tensor's end; lengths beyond the capacity."""
    torch.manual_seed(capacity)
    q = torch.randn(3, heads, 576, device="cuda", dtype=BF16)
    rows = torch.randn(3, capacity, 576, device="cuda").to(dtype)
    lengths = [capacity, capacity + 1000, max(1, capacity - 7)]
    out = attend("split", q, rows, torch.tensor(lengths, dtype=torch.int32, device="cuda"))
    assert distance(out, reference(q, rows.float(), lengths)) < EXACT


@pytest.mark.parametrize("heads", [8, 64])
def test_writes_stay_inside(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is allocated lies between guards, which are left as they were; so is the cache."""
    q, _, cache, table, seq_lens = paged_case([700, 0, 64], heads, 1024)
    before = cache.view(torch.int16).clone()
    guard, held = 4096, []

    def guarded(tensor: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        count = torch.Size(shape).numel()
        held.append(torch.full((count + 2 * guard,), 7.0, dtype=dtype or tensor.dtype, device=tensor.device))
        return held[-1][guard:-guard].view(shape)

    monkeypatch.setattr(Tensor, "new_empty", guarded)
    for splits in (1, 5):
        run(q, cache, seq_lens, SCALE, table, splits)
    assert len(held) == 4
    assert all((one[:guard] == 7).all() and (one[-guard:] == 7).all() for one in held)
    assert torch.equal(cache.view(torch.int16), before)


@pytest.mark.parametrize("heads", [8, 64])
def test_sharp_scores(heads: int) -> None:
    """One row has nearly all the weight, in any part; scores of hundreds do not overflow."""
    q, rows, cache, table, seq_lens = paged_case([8000, 8192], heads, 8192)
    out = attend("split", q, cache, seq_lens, table, 20.0)
    assert out.isfinite().all()
    assert distance(out, reference(q, rows, [8000, 8192], 20.0)) < EXACT


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("form", ["plan", "rounded"])
def test_growing_scores(form: str, heads: int) -> None:
    """Every head's largest score is multiplied by 2**8 or 2**16 three times: no weight is too large for its format."""
    lengths = [8192, 3000, 5000]
    q, rows, *_, seq_lens = paged_case(lengths, heads, 8192)
    rows = rows.nan_to_num().to(E4M3)
    q, scale = exact_case(rows, rows, q.shape[:2])
    for one, length in zip(rows, lengths, strict=True):
        one[:length, LATENT:] = (torch.arange(length, device="cuda")[:, None] * 4 // length - 3).to(E4M3)
    found = attend(form, q, rows, seq_lens, None, 8 * scale, HALF)
    assert distance(found, reference(q, rows.float() * HALF, lengths, 8 * scale)) < EXACT


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.memory(6)
def test_offsets_beyond_32_bits(heads: int) -> None:
    pages = 2**31 // (PAGE * 576) + 100
    cache = torch.zeros(pages, PAGE, 576, device="cuda", dtype=BF16)
    cache[-4:].normal_()
    q = torch.randn(1, heads, 576, device="cuda", dtype=BF16)
    table = torch.arange(pages - 4, pages, dtype=torch.int32, device="cuda").view(1, 4)
    out = attend("split", q, cache, torch.tensor([250], dtype=torch.int32, device="cuda"), table)
    assert distance(out, reference(q, cache[-4:].reshape(1, 256, 576), [250])) < EXACT
