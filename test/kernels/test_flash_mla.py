"""Where MLA decode goes to vLLM's FlashMLA, without it."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention import flash_mla


@pytest.mark.parametrize(("batch", "capacity", "heads", "dtype", "wanted"), [
    (64, 8192, 64, torch.float8_e4m3fn, True),
    (64, 8192, 64, torch.bfloat16, False),
    (64, 8192, 8, torch.float8_e4m3fn, False),  # ours is faster
    (2, 1024, 64, torch.float8_e4m3fn, False),
    (64, 8200, 64, torch.float8_e4m3fn, False),  # no whole pages
])  # fmt: skip
def test_many_heads_over_many_rows(
    monkeypatch: pytest.MonkeyPatch, batch: int, capacity: int, heads: int, dtype: torch.dtype, wanted: bool
) -> None:
    cache = torch.empty(0, dtype=dtype)
    assert not flash_mla.serves(batch, capacity, heads, cache), "vLLM is not installed here"
    monkeypatch.setattr(flash_mla, "library", lambda: object())
    assert flash_mla.serves(batch, capacity, heads, cache) == wanted


def test_another_kernels_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "library", lambda: object())
    q, cache = torch.zeros(2, 64, 576, dtype=torch.bfloat16), torch.zeros(2, 2**16, 576, dtype=torch.float8_e4m3fn)
    with pytest.raises(KernelError, match="expected flash_mla's"):
        flash_mla.attend(q, cache, None, torch.ones(2, dtype=torch.int32), 1.0, torch.zeros(300, 4, dtype=torch.int32))
