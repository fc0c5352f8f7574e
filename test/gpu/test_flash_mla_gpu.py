"""MLA decode by vLLM's FlashMLA, which rounds queries and weights to e4m3, against float64 and through the table.

Needs a Hopper GPU, nvcc and vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kimi_k2.bench.kernels.mla_cases import SCALE, paged_case, reference, relative
from kimi_k2.kernels.attention import flash_mla
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.ops import mla_decode as ops_decode
from kimi_k2.ops import mla_paged, registry

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER or find_nvcc() is None, reason="needs a Hopper GPU, nvcc"),
    pytest.mark.skipif(HOPPER and flash_mla.library() is None, reason="needs vLLM's FlashMLA"),
]
E4M3 = torch.float8_e4m3fn
# Three bits of queries and weights, as FlashMLA's own tests allow.
ROUNDED, OURS = 0.06, 4e-3
LENGTHS = [[8192, 1, 64, 65, 5000, 127] * 3, [2000] * 17]


@pytest.fixture(autouse=True)
def pinned() -> Iterator[None]:
    registry.pin("mla_decode=flash_mla,paged_mla_decode=flash_mla")
    yield
    registry.pin("")


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_through_the_table(lengths: list[int], heads: int) -> None:
    """Many heads by FlashMLA, few by ours; pages, one piece, and a graph whose lengths change."""
    q, rows, cache, table, seq_lens = paged_case(lengths, heads, 8192)
    rows, cache = rows.to(E4M3), cache.to(E4M3)
    served = flash_mla.serves(len(lengths), 8192, heads, cache)
    assert served == (heads == 64)
    # FlashMLA reads whole pages, and what a table says past a sequence's end.
    table.clamp_(max=len(cache) - 1)
    rows, cache = (torch.where(x.float().isnan(), 0, x.float()).to(E4M3) for x in (rows, cache))

    def paged() -> torch.Tensor:
        plan = mla_paged.paged_attention_plan(seq_lens, cache, table, heads)
        assert plan is not None and (plan.dim() == 1) == served
        return mla_paged.paged_mla_decode(q, cache, table, seq_lens, SCALE, 512, plan)

    wanted, error = reference(q, rows.float(), lengths), ROUNDED if served else OURS
    found = paged()
    assert relative(found, wanted) < error
    plan = ops_decode.attention_plan(seq_lens, rows, heads)
    whole = ops_decode.mla_decode(q, rows, seq_lens, SCALE, 512, plan)
    assert relative(whole, wanted) < error
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = paged()
    shorter = [1 + length // 2 for length in lengths]
    seq_lens.copy_(torch.tensor(shorter, dtype=torch.int32))
    graph.replay()
    assert relative(replayed, reference(q, rows.float(), shorter)) < error


def test_a_bf16_cache_goes_to_ours() -> None:
    q, rows, _, _, seq_lens = paged_case([8192] * 16, 64, 8192)
    found = ops_decode.mla_decode(q, rows, seq_lens, SCALE, 512, ops_decode.attention_plan(seq_lens, rows, 64))
    assert relative(found, reference(q, rows, [8192] * 16)) < OURS
