"""What a machine without a GPU can hold of MLA decode attention: refusals, the fake operation, choices of launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k2.bench.kernels import mla as bench
from kimi_k2.bench.kernels.mla_cases import ragged_inputs
from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention import flash_prefill
from kimi_k2.kernels.attention import mla_decode as mla
from kimi_k2.kernels.attention.mla_prefill import mla_prefill, supports_mla_naive_attention
from kimi_k2.kernels.attention.mla_sizes import CACHE_DTYPES, HEADS
from kimi_k2.kernels.rowwise.decode import absorb_and_store
from kimi_k2.ops.mla import mla_absorbed_attention

BF16, INT32 = torch.bfloat16, torch.int32


def arguments() -> dict[str, Any]:
    return {
        "q": torch.zeros(2, 64, 576, dtype=BF16),
        "cache": torch.zeros(10, 64, 576, dtype=BF16),
        "seq_lens": torch.zeros(2, dtype=INT32),
        "softmax_scale": 0.1,
        "block_table": torch.zeros(2, 5, dtype=INT32),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(2, 64, 576)}, r"q is torch\.float32"),
        ({"q": torch.zeros(2, 64, 512, dtype=BF16)}, "q is"),
        ({"q": torch.zeros(2, 12, 576, dtype=BF16)}, "12 heads"),
        ({"q": torch.zeros(64, 2, 576, dtype=BF16).transpose(0, 1)}, "q must be contiguous"),
        ({"cache": torch.zeros(10, 64, 576, dtype=torch.float16)}, "cache is"),
        ({"cache": torch.zeros(10, 128, 576, dtype=BF16)}, "pages of 128 rows"),
        ({"cache": torch.zeros(10, 64, 576, dtype=BF16), "block_table": None}, "10 sequences, expected 2"),
        ({"seq_lens": torch.zeros(2, dtype=torch.int64)}, "seq_lens is"),
        ({"seq_lens": torch.zeros(3, dtype=INT32)}, "seq_lens is"),
        ({"block_table": torch.zeros(3, 5, dtype=INT32)}, "block_table is"),
        ({"block_table": torch.zeros(2, 5, dtype=torch.int64)}, "block_table is"),
        ({"block_table": torch.zeros(5, 2, dtype=INT32).t()}, "block_table must be contiguous"),
    ],
)
def test_bad_arguments_are_named(changes: dict[str, Any], message: str) -> None:
    with FakeTensorMode() as mode:
        given = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in (arguments() | changes).items()
        }
        with pytest.raises(KernelError, match=message):
            mla.mla_decode(**given)


def test_too_many_rows_are_refused() -> None:
    with FakeTensorMode():
        cache = torch.empty(2**25, 64, 576, dtype=BF16)
        given = {**arguments(), "cache": cache}
        with pytest.raises(KernelError, match="fewer than"):
            mla.mla_decode(**given)


@pytest.mark.parametrize("heads", HEADS)
def test_fake_operation_has_the_plain_ones_shape(heads: int) -> None:
    q, cache = torch.randn(3, 1, heads, 576), torch.randn(3, 20, 576)
    wanted = mla_absorbed_attention(q[..., :512], q[..., 512:], cache, torch.full((3, 1), 19), 0.1)
    with FakeTensorMode():
        one = ragged_inputs([100] * 3, heads, device="cpu")
        got = mla.mla_decode(one.q, one.cache, one.seq_lens, 0.1, one.block_table)
    assert (got.shape, got.dtype) == (wanted[:, 0].shape, BF16)


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_fake_operations_take_both_cache_dtypes_and_a_scale(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        one = ragged_inputs([100] * 3, 8, dtype, "cpu")
        got = mla.mla_decode(one.q, one.cache, one.seq_lens, 0.1, one.block_table, 0.05)
        assert (got.shape, got.dtype) == ((3, 8, 512), BF16)
        cos, w_uk = torch.empty(3, 32, dtype=BF16), torch.empty(8, 128, 512, dtype=BF16)
        kv_a, cache = torch.empty(3, 576, dtype=BF16), torch.empty(3, 70, 576, dtype=dtype)
        norm, positions = torch.empty(512, dtype=BF16), torch.zeros(3, dtype=torch.int64)
        q = torch.empty(3, 8 * 192, dtype=BF16)
        query = absorb_and_store(q, kv_a, norm, cos, cos, positions, w_uk, cache, 1e-6, 0.05)
        assert (query.shape, query.dtype) == ((3, 8, 576), BF16)


def test_cpu_tensors_are_left_to_the_plain_operation() -> None:
    one = ragged_inputs([128] * 2, 64, device="cpu")
    assert not mla.supports(one.q, one.cache, one.seq_lens, one.block_table)


@pytest.mark.parametrize("nvcc", ["nvcc", None])
def test_without_a_compiler_the_kernel_takes_nothing(monkeypatch: pytest.MonkeyPatch, nvcc: str | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(mla, "find_nvcc", lambda: nvcc)
    with FakeTensorMode():
        q, cache = (torch.empty(*shape, dtype=BF16, device="cuda") for shape in ((2, 64, 576), (10, 64, 576)))
        lengths, table = (torch.empty(*shape, dtype=INT32, device="cuda") for shape in ((2,), (2, 5)))
        assert mla.supports(q, cache, lengths, table) is (nvcc is not None)


def test_a_benchmarks_case_counts_what_must_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ways", lambda batch, others: {})
    even = "64 heads, B=16, equal, median 8192, max 8192"
    one = next(case for case in bench.cases(with_peers=False) if case.name == even)
    shapes = ((16, 64, 576), (16, 8192, 576), (16, 64, 512))
    assert one.bytes == sum(torch.empty(shape, dtype=BF16, device="meta").nbytes for shape in shapes)


def test_prefill_shapes_and_refusals() -> None:
    with FakeTensorMode():
        nope, rope = torch.empty(2, 5, 8, 128, dtype=torch.bfloat16), torch.empty(2, 5, 8, 64, dtype=torch.bfloat16)
        cache, positions = torch.empty(2, 9, 576, dtype=torch.bfloat16), torch.zeros(2, 5, dtype=torch.int64)
        expanded = torch.empty(2, 8, 9, 256, dtype=torch.bfloat16)
        out = mla_prefill(nope, rope, expanded, cache, positions, 0.1)
        assert (out.shape, out.dtype) == ((2, 5, 8, 128), torch.bfloat16)
        for arguments, message in (
            ((nope, rope[..., :32], expanded, cache, positions), "q_rope"),
            ((nope, rope, expanded[:, :, :8], cache, positions), "expanded"),
            ((nope, rope, expanded, cache.float(), positions), "cache"),
            ((nope, rope, expanded, cache, positions.int()), "positions"),
        ):
            with pytest.raises(KernelError, match=message):
                mla_prefill(*arguments, 0.1)


def test_prefill_offsets_beyond_32_bits_are_refused() -> None:
    """The widest row counts, the cache's too: 2**31 / 576 slots."""
    with FakeTensorMode():
        nope, rope = torch.empty(1, 5, 1, 128, dtype=BF16), torch.empty(1, 5, 1, 64, dtype=BF16)
        positions = torch.zeros(1, 5, dtype=torch.int64)
        for slots, refused in ((2**31 // 576 - 1, False), (2**31 // 576, True)):
            cache, expanded = torch.empty(1, slots, 576, dtype=BF16), torch.empty(1, 1, slots, 256, dtype=BF16)
            if refused:
                with pytest.raises(KernelError, match=f"{slots} slots, expected fewer"):
                    mla_prefill(nope, rope, expanded, cache, positions, 0.1)
            else:
                assert mla_prefill(nope, rope, expanded, cache, positions, 0.1).shape == (1, 5, 1, 128)


@pytest.mark.parametrize(("capability", "taken"), [((9, 0), True), ((8, 9), False), ((12, 0), False)])
def test_prefill_is_for_hopper(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], taken: bool) -> None:
    """Others have no room for the launch in shared memory, or it was not measured there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with FakeTensorMode():
        shapes = (1, 5, 8, 128), (1, 5, 8, 64), (1, 9, 576), (8, 256, 512)
        q_nope, q_rope, cache, kv_b = (torch.empty(*shape, dtype=BF16, device="cuda") for shape in shapes)
        positions = torch.zeros(1, 5, dtype=torch.int64, device="cuda")
        assert supports_mla_naive_attention(q_nope, q_rope, cache, kv_b, positions, 0.1) is taken


@pytest.mark.parametrize(
    ("queries", "slots", "whole", "installed", "taken"),
    [
        (2048, 2048, True, True, True), (1024, 4096, True, True, True), (2048, 2048, False, True, False),
        (2048, 2048, True, False, False), (1024, 1024, True, True, False), (16, 2**20, True, True, False),
    ],
)  # fmt: skip
def test_flash_attention_is_for_whole_chunks(
    monkeypatch: pytest.MonkeyPatch, queries: int, slots: int, whole: bool, installed: bool, taken: bool
) -> None:
    """Many tokens that end where the cache ends; without vLLM, ours."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flash_prefill, "flash_attention", lambda: print if installed else None)
    with FakeTensorMode():
        shapes = (1, queries, 8, 128), (1, queries, 8, 64), (1, slots, 576), (8, 256, 512)
        q_nope, q_rope, cache, kv_b = (torch.empty(*shape, dtype=BF16, device="cuda") for shape in shapes)
        positions = torch.zeros(1, queries, dtype=torch.int64, device="cuda")
        assert flash_prefill.supports(q_nope, q_rope, cache, kv_b, positions, 0.1, whole) is taken


def test_flash_attention_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_prefill, "flash_attention", lambda: None)
    with pytest.raises(KernelError, match="FlashAttention 3 is not installed"):
        flash_prefill.attend(torch.zeros(1, 4, 2, 192), torch.zeros(1, 4, 2, 192), torch.zeros(1, 4, 2, 128), 0.1)
