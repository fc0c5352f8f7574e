"""What a machine without a GPU can hold of MLA decode in CUDA C++: choice of kernel and launch, what nvcc reports."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention import mla_cuda, mla_decode
from kimi_k2.kernels.attention.mla_sizes import HEADS, PAGE
from kimi_k2.kernels.common import build


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("batch", [1, 3, 16, 64, 500])
@pytest.mark.parametrize("capacity", [1, 64, 1000, 131072])
def test_launch_is_one_wave_of_whole_steps(batch: int, heads: int, capacity: int) -> None:
    splits = mla_cuda.choose_splits(batch, capacity, 132)
    assert 1 <= splits <= max(1, 132 // batch)
    assert (splits - 1) * PAGE < capacity
    assert splits == 1 or capacity > mla_cuda.CUT_FROM


@pytest.mark.parametrize("splits", [0, 129])
def test_splits_beyond_the_joins_reach_are_refused(splits: int) -> None:
    unread = torch.empty(1)
    with pytest.raises(KernelError, match="splits 1 to 128"):
        mla_cuda.run(unread, unread, unread, 0.1, None, splits)


@pytest.mark.parametrize(("batch", "heads", "capacity", "wanted"), [
    (2, 64, 64, True),
    (16, 64, 128, True),
    (17, 64, 64, False),  # more requests than SMs
    (1, 64, 8192, False),  # much is read again
    (2, 8, 64, False),
])  # fmt: skip
def test_eights_are_requests_where_contexts_are_short(batch: int, heads: int, capacity: int, wanted: bool) -> None:
    assert mla_cuda.by_eights(batch, heads, capacity, 132) == wanted


@pytest.mark.skipif(build.find_nvcc() is None, reason="needs nvcc")
@pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="slow: runs with KIMI_K2_SLOW=1")
def test_compiles_without_spills_or_serialized_products(tmp_path: Path) -> None:
    nvcc = build.find_nvcc()
    assert nvcc is not None
    command = [nvcc, *build.FLAGS, "-Xptxas", "-v", f"-I{build.KERNELS}", "-o", str(tmp_path / "mla.so")]
    report = subprocess.run(
        [*command, str(build.source_of("attention/mla_decode"))], capture_output=True, text=True, check=True
    ).stderr
    spilled = dict(re.findall(r"Function properties for (\w+)\s+\d+ bytes stack frame, (\d+) bytes spill", report))
    assert any("attend" in name for name in spilled)
    # Of 32 heads and more over e4m3 registers are short: what is used once a step may wait.
    allowed = {name: 40 if re.search(r"\dattend(_planned)?ILb1E", name) else 0 for name in spilled}
    assert all(int(count) <= allowed[name] for name, count in spilled.items()), spilled
    assert "serialized" not in report


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("tokens", range(1, 9))
def test_queries_are_folded_into_requests(tokens: int, heads: int) -> None:
    """Every query once, in order, as many rows together as there is room for; a request's last one sees its length."""
    fold = mla_decode.folding(tokens, heads)
    assert fold.rows in HEADS and fold.rows == fold.tokens * heads
    assert fold.requests * fold.tokens == fold.padding + tokens and 0 <= fold.padding < 2 * fold.tokens
    assert fold.requests == 1 or fold.rows == 64
    lengths = mla_decode.request_lengths(torch.tensor([100, 2], dtype=torch.int32), tokens, heads).view(2, -1)
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
