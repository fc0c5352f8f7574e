"""A decode step's attention over pages: the bits of the same over a cache in one piece. Needs a Hopper GPU and nvcc."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.ops.linear import Weight
from kimi_k2.ops.mla import attend_values, attention_plan, gather_pages, query_and_entry
from kimi_k2.ops.registry import PLAIN
from kimi_k2.quantization.fp8_block import Fp8BlockFormat

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER or find_nvcc() is None, reason="needs a Hopper GPU, nvcc")]
PAGE, HEADS, RANK, ROPE = 64, 8, 512, 64
BF16 = torch.bfloat16


def paged(whole: Tensor) -> tuple[Tensor, Tensor]:
    """The cache [B, T, C] in pages of any order, and the block table; page 0 is nobody's."""
    batch, capacity, width = whole.shape
    count = batch * capacity // PAGE
    order = torch.randperm(count, device="cuda") + 1
    pages = torch.randn(count + 3, PAGE, width, device="cuda").to(whole.dtype)
    pages[order] = whole.view(-1, PAGE, width)
    return pages, order.view(batch, -1).int()


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("batch", [1, 3, 8, 20, 65])
def test_same_bits_as_in_one_piece(batch: int, fp8: bool) -> None:
    torch.manual_seed(batch)
    capacity = 1024
    whole = torch.randn(batch, capacity, RANK + ROPE, device="cuda").to(BF16)
    pages, table = paged(whole)
    seq_lens = torch.randint(1, capacity + 1, (batch,), device="cuda", dtype=torch.int32)
    positions = seq_lens.long() - 1
    slots = table.gather(1, (positions // PAGE)[:, None])[:, 0].long() * PAGE + positions % PAGE
    own = torch.arange(0, batch * capacity, capacity, device="cuda") + positions
    if batch > 1:
        slots[-1] = own[-1] = -1
    qkv_a = torch.randn(batch, 1536 + RANK + ROPE, device="cuda").to(BF16)
    w_uk, w_uv = (torch.randn(HEADS, *shape, device="cuda").to(BF16) for shape in ((128, RANK), (128, RANK)))
    weight = torch.randn(HEADS * 192, 1536, device="cuda")
    q_b = Weight({"weight": weight.to(BF16)})
    if fp8:
        scale = torch.rand(HEADS * 192 // 128, 12, device="cuda")
        q_b = Weight({"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": scale}, Fp8BlockFormat())
    q_norm, kv_norm = torch.rand(1536, device="cuda").to(BF16), torch.rand(RANK, device="cuda").to(BF16)
    cos, sin = torch.randn(2, batch, ROPE // 2, device="cuda").to(BF16)
    given = qkv_a, q_norm, q_b, kv_norm, cos, sin
    assert query_and_entry.choose(*given, slots, w_uk, pages, 1e-6, 1e-6).name == (
        "cuda" if batch <= (4 if fp8 else 2) else PLAIN
    )
    wanted = query_and_entry(*given, own, w_uk, whole, 1e-6, 1e-6)
    query = query_and_entry(*given, slots, w_uk, pages, 1e-6, 1e-6)
    assert torch.equal(query, wanted)
    assert torch.equal(gather_pages(pages, table, capacity), whole)

    plans = attention_plan(seq_lens, whole, HEADS), attention_plan(seq_lens, pages, HEADS, table)
    assert (plans[0] is None) == (plans[1] is None)
    assert batch > 1 or plans[0] is None
    for one, other in (plans, (None, None)):
        wanted = attend_values(query, whole, seq_lens, w_uv, 0.05, one)
        assert torch.equal(attend_values(query, pages, seq_lens, w_uv, 0.05, other, table), wanted)


def test_padding_in_a_graph() -> None:
    """As engines pad a captured batch: no slot, no length; what is there comes out as without padding."""
    torch.manual_seed(0)
    whole = torch.randn(8, 512, RANK + ROPE, device="cuda").to(BF16)
    pages, table = paged(whole)
    seq_lens = torch.tensor([5, 512, 64, 0, 0, 0, 0, 0], device="cuda", dtype=torch.int32)
    table[3:] = 0
    query = torch.randn(8, HEADS, RANK + ROPE, device="cuda").to(BF16)
    w_uv = torch.randn(HEADS, 128, RANK, device="cuda").to(BF16)

    def step() -> Tensor:
        plan = attention_plan(seq_lens, pages, HEADS, table)
        return attend_values(query, pages, seq_lens, w_uv, 0.05, plan, table)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    seq_lens.copy_(torch.tensor([300, 7, 65, 0, 0, 0, 0, 0]))
    graph.replay()
    found = captured.clone()
    assert torch.equal(found, step())
    assert found.isfinite().all()
    assert not found[3:].any()
    exact = attend_values(query[:3], whole[:3].contiguous(), seq_lens[:3].contiguous(), w_uv, 0.05)
    torch.testing.assert_close(found[:3].float(), exact.float(), rtol=2e-2, atol=2e-2)
