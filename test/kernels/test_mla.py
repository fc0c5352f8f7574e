"""What a machine without a GPU can hold of MLA decode attention: refusals, the fake operation, choices of launch."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k2.bench.kernels import mla as bench
from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention import mla_cuda, mla_prefill
from kimi_k2.kernels.attention import mla_decode as mla
from kimi_k2.kernels.attention.mla_prefill import supports_mla_naive_attention
from kimi_k2.kernels.attention.mla_sizes import HEADS
from kimi_k2.kernels.common import hardware

BF16, INT32 = torch.bfloat16, torch.int32


@pytest.mark.parametrize("nvcc", ["nvcc", None])
def test_without_a_compiler_the_kernel_takes_nothing(monkeypatch: pytest.MonkeyPatch, nvcc: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(hardware, "find_nvcc", lambda: nvcc)
    with FakeTensorMode():
        q, cache = (torch.empty(*shape, dtype=BF16, device="cuda") for shape in ((2, 64, 576), (10, 64, 576)))
        lengths, table = (torch.empty(*shape, dtype=INT32, device="cuda") for shape in ((2,), (2, 5)))
        assert mla.mla_decode.takes(q, cache, lengths, 0.1, table) is (nvcc is not None)


def test_a_benchmarks_case_counts_what_must_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ways", lambda batch, others: {})
    even = "64 heads, B=16, equal, median 8192, max 8192"
    one = next(case for case in bench.cases(with_peers=False) if case.name == even)
    shapes = ((16, 64, 576), (16, 8192, 576), (16, 64, 512))
    assert one.bytes == sum(torch.empty(shape, dtype=BF16, device="meta").nbytes for shape in shapes)


@pytest.mark.parametrize(("capability", "taken"), [((9, 0), True), ((8, 9), False), ((12, 0), False)])
def test_prefill_is_for_hopper(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], taken: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(hardware, "find_nvcc", lambda: "nvcc")
    with FakeTensorMode():
        shapes = (1, 5, 8, 128), (1, 5, 8, 64), (1, 9, 576), (8, 256, 512)
        q_nope, q_rope, cache, kv_b = (torch.empty(*shape, dtype=BF16, device="cuda") for shape in shapes)
        positions = torch.zeros(1, 5, dtype=torch.int64, device="cuda")
        assert supports_mla_naive_attention(q_nope, q_rope, cache, kv_b, positions, 0.1) is taken


def test_tiles_of_sequences_one_after_the_other() -> None:
    """First query, queries, first slot and position, those that see most first; as many launches as it takes."""
    (table, count, longest, mean), *more = mla_prefill._tables((130, 0, 5), (130, 9, 400))
    assert [tuple(table[4 * at : 4 * at + 4]) for at in range(count)] == [
        (130, 5, 139, 395), (128, 2, 0, 128), (0, 128, 0, 0)
    ]  # fmt: skip
    assert (longest, mean, more) == (4, (4 + 2 + 1) / 3, [])
    counts = [count for _, count, *_ in mla_prefill._tables((1,) * 400, (1,) * 400)]
    assert counts == [192, 192, 16] and all(count * 4 <= len(table) for count in counts)


@pytest.mark.parametrize(
    ("tiles", "longest", "mean", "ranks"),
    [(64, 8, 4.5, 2), (128, 8, 4.5, 1), (128, 16, 8.5, 2), (256, 32, 16.5, 1), (128, 128, 124.5, 1), (1, 1, 1, 2)],
)
def test_blocks_share_tiles_where_that_ends_earlier(tiles: int, longest: int, mean: float, ranks: int) -> None:
    assert mla_prefill.ranks_of(tiles, longest, mean, 132) == ranks


@pytest.mark.parametrize(
    ("new", "lengths"), [([2, 3], [4, 4]), ([2, 2], [4, 5]), ([5], [4, 5]), ([5, 0], [4, 5]), ([6, -1], [6, 3])]
)
def test_lengths_that_do_not_fit_are_refused(new: list[int], lengths: list[int]) -> None:
    shapes = (5, 8, 128), (5, 8, 64), (8, 9, 256), (9, 576)
    with FakeTensorMode(), pytest.raises(KernelError, match="expected"):
        mla_prefill.mla_prefill_ragged(*(torch.empty(*shape, dtype=BF16) for shape in shapes), new, lengths, 0.1)


@pytest.mark.parametrize("splits", [0, 129])
def test_splits_beyond_the_joins_reach_are_refused(splits: int) -> None:
    unread = torch.empty(1)
    with pytest.raises(KernelError, match="splits 1 to 128"):
        mla_cuda.run(unread, unread, unread, 0.1, None, splits)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", range(1, 9))
def test_queries_are_folded_into_requests(tokens: int, heads: int) -> None:
    """Every query once, in order, as many rows together as there is room for; a request's last one sees its length."""
    fold = mla.folding(tokens, heads)
    assert fold.rows in HEADS and fold.rows == fold.tokens * heads
    assert fold.requests * fold.tokens == fold.padding + tokens and 0 <= fold.padding < 2 * fold.tokens
    assert fold.requests == 1 or fold.rows == 64
    lengths = mla.request_lengths(torch.tensor([100, 2], dtype=torch.int32), tokens, heads).view(2, -1)
    assert lengths.dtype == torch.int32
    for request in range(fold.requests):
        behind = (fold.requests - 1 - request) * fold.tokens
        assert lengths[:, request].tolist() == [100 - behind, max(0, 2 - behind)]


@pytest.mark.parametrize("scales", [(-0.1, 1.0), (0.1, 0.0), (float("nan"), 1.0)])
def test_rounded_queries_want_positive_scales(scales: tuple[float, float]) -> None:
    """The largest score is found before it is multiplied."""
    q, cache = torch.empty(1, 8, 576, dtype=torch.bfloat16), torch.empty(1, 64, 576, dtype=torch.float8_e4m3fn)
    lengths, plan = torch.ones(1, dtype=torch.int32), torch.zeros(8, 4, dtype=torch.int32)
    with pytest.raises(KernelError, match="positive"):
        mla_cuda.run_planned(q, cache, lengths, scales[0], None, plan, scales[1], terms=1)
