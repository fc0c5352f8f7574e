"""What a machine without a GPU can see of the kernels for a few tokens: shapes, refusals, the interfaces to CUDA."""

from __future__ import annotations

import re

import pytest
import torch

from kimi_k2.kernels.common import build
from kimi_k2.kernels.experts import fp8_decode as moe_decode
from kimi_k2.kernels.experts import w4a16 as moe_w4a16
from kimi_k2.kernels.experts.w4a16_layout import FORMATS
from kimi_k2.kernels.linear.fused_linear import DECODE_COLUMNS


def test_pairs_are_taken_one_by_one_while_their_intermediates_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank of TP8, TP4, TP2, TP1, EP8 and EP4: experts per token and their width."""
    monkeypatch.setattr(moe_decode, "runs_cuda", lambda device: True)

    def most(top_k: int, inter: int) -> int:
        return sum(moe_decode.supports(n, top_k, 7168, inter, torch.device("cuda")) for n in range(1, 10))

    sizes = (8, 256), (8, 512), (8, 1024), (8, 2048), (1, 2048), (2, 2048)
    assert [most(*size) for size in sizes] == [4, 2, 1, 1, 4, 2]


def test_the_widths_are_those_that_have_an_instance() -> None:
    def cases(source: str, switch: str) -> list[int]:
        text = build.source_of(source).read_text()
        return [int(width) for width in re.findall(r"case (\d+):", text[text.index(switch) :])]

    assert cases("linear/linear_decode", "switch (a.columns)") == 2 * list(DECODE_COLUMNS)  # FP8, BF16
    assert cases("experts/fp8_decode", "switch (a->hidden)") == list(moe_decode.HIDDEN)
    known = [*moe_w4a16.DECODE_HIDDEN, *range(len(FORMATS))]
    assert cases("experts/w4a16_decode", "switch (a.hidden)") == known
