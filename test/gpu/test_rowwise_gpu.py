"""The launches between prefill's products, on a GPU: bits of the plain functions, or float64."""

from __future__ import annotations

import pytest
import torch

from kimi_k2.kernels.router.entries import route
from kimi_k2.kernels.rowwise import next_step, pairs
from kimi_k2.kernels.rowwise.prefill import (
    fp8_block_to_bf16,
    held_rows,
    rotate_in_place,
    rotate_pairs,
    row_norm,
    write_slots,
)
from kimi_k2.ops import mla
from kimi_k2.ops.experts import noaux_tc_gate

hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not hopper, reason="needs a Hopper GPU")]


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("rows", "columns"), [(576, 7168), (7168, 1024), (130, 300)])
def test_blocks_to_bf16_are_rounded_once(rows: int, columns: int) -> None:
    """Every code, NaN's too."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device="cuda")
    scale = torch.rand(-(-rows // 128), -(-columns // 128), device="cuda") + 0.01
    weight = codes.view(torch.float8_e4m3fn)
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    wanted = (weight.cpu().float() * wide.cpu()).bfloat16()
    assert torch.equal(fp8_block_to_bf16(weight, scale).cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("size", [512, 1536, 7168])
def test_norm(size: int) -> None:
    x, weight = torch.randn(50, size + 64, device="cuda").bfloat16()[:, :size], torch.rand(size, device="cuda")
    wide = x.double()
    wanted = wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.bfloat16().double()
    assert distance(row_norm(x, weight.bfloat16(), 1e-6), wanted) < 1.8e-3  # one rounding to BF16; two: 2.3e-3


def test_compiled_and_registered_as_it_is_called() -> None:
    """The way through PyTorch's dispatcher, which eager calls do not take: schema, fake, and torch.compile."""
    x, weight = torch.randn(6, 512, device="cuda").bfloat16(), torch.rand(512, device="cuda").bfloat16()
    torch.library.opcheck(row_norm.registered, (x, weight, 1e-6), test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda a, b: row_norm(a, b, 1e-6) * 2, fullgraph=True)
    assert torch.equal(compiled(x, weight), row_norm(x, weight, 1e-6) * 2)


@pytest.mark.parametrize("heads", [1, 8, 64])
def test_rotation(heads: int) -> None:
    x = torch.randn(2, 40, heads, 192, device="cuda").bfloat16()[..., 128:]
    angles = torch.rand(2, 40, 32, device="cuda") * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    wanted = torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())[:, :, None]).flatten(-2)
    rotated = rotate_pairs(x, cos, sin)
    assert distance(rotated, wanted) < 1.8e-3  # one rounding to BF16
    assert rotate_in_place(x, cos[:, :, None], sin[:, :, None]) is x and torch.equal(x, rotated)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_slots(dtype: torch.dtype) -> None:
    """A slot a token, none for padding or past the end; e4m3 saturates and rounds as PyTorch does."""
    entries = torch.randn(2, 30, 576, device="cuda").bfloat16() * 200
    cache = torch.randn(2, 25, 576, device="cuda").to(dtype)
    positions = torch.stack([torch.randperm(30) - 3 for _ in range(2)]).cuda()
    wanted = cache.float()
    stored = entries.clamp(-448, 448).to(dtype).float() if dtype == torch.float8_e4m3fn else entries.float()
    for b in range(2):
        for s, position in enumerate(positions[b].tolist()):
            if 0 <= position < 25:
                wanted[b, position] = stored[b, s]
    write_slots(cache, entries, positions)
    assert torch.equal(cache.float(), wanted)


@pytest.mark.parametrize(("tokens", "experts"), [(100, 384), (1500, 256)])
def test_routing_of_many(tokens: int, experts: int) -> None:
    """Biases that no rounding overrules, so that choices compare; weights against float64."""
    x = torch.randn(tokens, 7168, device="cuda").bfloat16()
    weight = (torch.randn(experts, 7168, device="cuda") * 0.02).bfloat16()
    bias = 2.0 * torch.randperm(experts, device="cuda").float()
    indices, weights = route(x, weight, bias, 8, norm_topk_prob=True, routed_scaling_factor=2.827)
    logits = x.double() @ weight.double().T
    wanted = noaux_tc_gate(logits, bias.double(), 8, norm_topk_prob=True, routed_scaling_factor=2.827)
    assert torch.equal(indices, wanted[0])
    assert distance(weights, wanted[1]) < 1e-5


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_of_a_rank(dtype: torch.dtype) -> None:
    """Bits of the held rows, zeros for the others."""
    weight = torch.randn(300, 7168, device="cuda").bfloat16()
    ids = torch.randint(-20, 700, (1000,), dtype=dtype, device="cuda")
    here = (ids >= 200) & (ids < 500)
    wanted = torch.where(here[:, None], weight[(ids.long() - 200).clamp(0, 299)], torch.zeros_like(weight[:1]))
    assert torch.equal(held_rows(ids, weight, 200), wanted)
    assert here.any() and not here.all()


@pytest.mark.parametrize("shape", [(8, 7168), (1, 16), (77, 1024)])
def test_sums_and_products_of_two(shape: tuple[int, int]) -> None:
    """The bits of PyTorch; infinities and NaN too. Others are left to it."""
    a, b = ((torch.randn(shape, device="cuda") * 4).bfloat16() for _ in range(2))
    a[0, :2], b[0, 1] = float("inf"), -float("inf")
    assert pairs.supports_add(a, b) and torch.equal(pairs.add(a, b).nan_to_num(7.0), (a + b).nan_to_num(7.0))
    assert not any(pairs.supports_add(*two) for two in ((a, b[:, ::2]), (a.float(), b), (a[:, 1:], b[:, 1:])))
    gate, up = a.chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    assert pairs.supports_silu_and_mul(a) and not pairs.supports_silu_and_mul(a[:, 8:])
    assert torch.equal(pairs.silu_and_mul(a).nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("batch", [1, 64, 300])
def test_next_step_of_sequences_in_pages(batch: int) -> None:
    """The bits of the plain function, again and again from a graph."""
    lengths = torch.randint(0, 300, (batch,), dtype=torch.int32, device="cuda")
    table = torch.randint(1, 99, (batch, 7), dtype=torch.int32, device="cuda")
    ids, written = torch.arange(1, batch + 1, dtype=torch.int32, device="cuda"), lengths.long() + 77
    positions, slots = written.clone(), written.clone()
    given = lengths, ids, positions, slots, table
    one, two, three, four, five = wanted = tuple(tensor.cpu() for tensor in given)
    assert next_step.supports(lengths, ids, positions, slots, table, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mla.next_step(lengths, ids, positions, slots, table, 64)
    for _ in range(3):
        graph.replay()
        mla.next_step(one, two, three, four, five, 64)
        assert all(torch.equal(found.cpu(), one) for found, one in zip(given, wanted, strict=True))
