"""Choices of the launches between prefill's products; their arithmetic is in the interpreter's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k2.kernels.rowwise import prefill as rowwise
from kimi_k2.ops import registry

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def made(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Fake, on a GPU; parts are cut by `narrow`, as slicing asks for a build with CUDA."""
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_what_the_table_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As attention calls them: cuts of wider tensors, angles with and without a dimension for heads."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(rowwise, "has_triton", lambda: True)
    registry.load_providers()
    registry.pin("")
    with FakeTensorMode():
        both, angles, ids = made(2, 5, 576), made(2, 5, 32), made(2, 5, dtype=torch.int64)
        cache, positions = made(4, 2, 9, 576), made(2, 5, dtype=torch.int64)

        def prompt(cache: Tensor) -> tuple[Tensor | float, ...]:
            angles, slots = made(5, 32), made(5, dtype=torch.int64)
            return made(5, 8, 192), made(5, 2112).narrow(1, 1536, 576), made(512), angles, angles, slots, cache, 1e-6

        taken: list[tuple[str, tuple[object, ...]]] = [
            (
                "apply_rotary_interleaved",
                (made(2, 5, 8, 192).narrow(-1, 128, 64), angles.unsqueeze(2), angles.unsqueeze(2)),
            ),
            ("apply_rotary_interleaved", (both.narrow(-1, 512, 64), angles, angles)),
            ("rms_norm", (both.narrow(-1, 0, 512), made(512), 1e-6)),
            ("rotate_and_store", prompt(made(4, 9, 576))),
            ("rotate_and_store", prompt(made(4, 9, 576, dtype=FP8))),
            ("store_entries", (cache.select(0, 1), both, positions)),
            ("embedding", (ids, made(20, 7168), 40)),
            ("dequantize_fp8_block", (made(576, 7168, dtype=FP8), made(5, 56, dtype=torch.float32), (128, 128), BF16)),
        ]
        refused = [
            ("rotate_and_store", prompt(made(4, 9, 576).float())),
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
