"""Shapes, refusals and choices of the launches between prefill's products; their arithmetic is in the interpreter's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k2.errors import KernelError
from kimi_k2.kernels.rowwise import prefill as rowwise
from kimi_k2.kernels.rowwise.prefill import fp8_block_to_bf16, held_rows, rotate_pairs, row_norm, write_slots
from kimi_k2.ops import registry

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def made(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_fakes() -> None:
    with FakeTensorMode():
        out = fp8_block_to_bf16(made(200, 300, dtype=FP8), made(2, 3, dtype=torch.float32))
        assert (tuple(out.shape), out.dtype) == ((200, 300), BF16)
        assert row_norm(made(4, 7168), made(7168), 1e-6).shape == (4, 7168)
        out = rotate_pairs(made(2, 3, 8, 192).narrow(-1, 128, 64), made(2, 3, 32), made(2, 3, 32))
        assert out.shape == (2, 3, 8, 64) and out.is_contiguous()
        assert held_rows(made(5, dtype=torch.int32), made(20, 7168), 40).shape == (5, 7168)
        assert write_slots(made(2, 9, 576, dtype=FP8), made(2, 3, 576), made(2, 3, dtype=torch.int64)) is None


REFUSALS: list[tuple[str, Callable[[], object]]] = [
    ("e4m3 matrix", lambda: fp8_block_to_bf16(made(200, 300), made(2, 3, dtype=torch.float32))),
    (r"float32 \[2, 3\]", lambda: fp8_block_to_bf16(made(200, 300, dtype=FP8), made(2, 2, dtype=torch.float32))),
    ("up to 8192", lambda: row_norm(made(2, 9000), made(9000), 1e-6)),
    ("expected torch.bfloat16", lambda: row_norm(made(2, 64, dtype=torch.float32), made(64), 1e-6)),
    ("power of two", lambda: rotate_pairs(made(1, 2, 3, 96), made(1, 2, 48), made(1, 2, 48))),
    ("sin is", lambda: rotate_pairs(made(1, 2, 3, 64), made(1, 2, 32), made(1, 3, 32))),
    ("cache is", lambda: write_slots(made(2, 9, 512), made(2, 3, 576), made(2, 3, dtype=torch.int64))),
    ("integers", lambda: held_rows(made(5), made(20, 64), 0)),
    ("expected contiguous torch.bfloat16", lambda: held_rows(made(5, dtype=torch.int64), made(20, 9000), 0)),
    ("int64", lambda: write_slots(made(2, 9, 576), made(2, 3, 576), made(2, 3, dtype=torch.int32))),
]


@pytest.mark.parametrize(("message", "call"), REFUSALS, ids=[message for message, _ in REFUSALS])
def test_refusals(message: str, call: Callable[[], object]) -> None:
    with FakeTensorMode(), pytest.raises(KernelError, match=message):
        call()


def test_what_the_table_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention calls them: cuts of wider tensors, angles with and without a dimension for heads."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(rowwise, "has_triton", lambda: True)
    registry.pin("")
    with FakeTensorMode():
        both, angles, ids = made(2, 5, 576), made(2, 5, 32), made(2, 5, dtype=torch.int64)
        cache, positions = made(4, 2, 9, 576), made(2, 5, dtype=torch.int64)
        taken = [
            (
                "apply_rotary_interleaved",
                (made(2, 5, 8, 192).narrow(-1, 128, 64), angles.unsqueeze(2), angles.unsqueeze(2)),
            ),
            ("apply_rotary_interleaved", (both.narrow(-1, 512, 64), angles, angles)),
            ("rms_norm", (both.narrow(-1, 0, 512), made(512), 1e-6)),
            ("store_entries", (cache.select(0, 1), both, positions)),
            ("embedding", (ids, made(20, 7168), 40)),
            ("dequantize_fp8_block", (made(576, 7168, dtype=FP8), made(5, 56, dtype=torch.float32), (128, 128), BF16)),
        ]
        refused = [
            ("embedding", (ids, made(20, 7168))),
            ("embedding", (ids, made(20, 7168).float(), 40)),
            ("rms_norm", (both.narrow(-1, 0, 512).float(), made(512), 1e-6)),
            ("rms_norm", (made(512), made(512), 1e-6)),
            ("apply_rotary_interleaved", (made(2, 5, 5, 64), angles.unsqueeze(1), angles.unsqueeze(1))),
            ("store_entries", (cache.select(0, 1).float(), both, positions)),
            ("store_entries", (cache.select(0, 1), both, positions.int())),
            ("dequantize_fp8_block", (made(576, 7168), made(5, 56, dtype=torch.float32), (128, 128), BF16)),
            ("dequantize_fp8_block", (made(576, 7168, dtype=FP8), made(5, 56, dtype=torch.float32), (128, 128))),
        ]
        for operation, arguments in taken:
            chosen = registry.TABLE[operation].choose(*arguments)
            assert chosen.name == "triton", operation
        for operation, arguments in refused:
            assert registry.TABLE[operation].choose(*arguments).name == "plain"
        assert rowwise.rms_norm(both.narrow(-1, 0, 512), made(512), 1e-6).shape == (2, 5, 512)
        assert rowwise.apply_rotary_interleaved(both.narrow(-1, 512, 64), angles, angles).shape == (2, 5, 64)
        assert rowwise.embedding(ids, made(20, 7168), 40).shape == (2, 5, 7168)
