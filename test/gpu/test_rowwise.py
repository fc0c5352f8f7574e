"""The launches between the GEMMs, and the vision tower's: bits of the plain functions, or float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from exact import E4M3, ROUNDED_ONCE, distance, turned
from machines import Machine, rows

from kimi_k2.kernels.router.entries import route
from kimi_k2.kernels.rowwise import pairs, step_inputs
from kimi_k2.kernels.rowwise.prefill import (
    fp8_block_to_bf16,
    held_rows,
    queries_and_entries,
    rotate_pairs,
    row_norm,
    write_slots,
)
from kimi_k2.kernels.vision.rowwise import add_layer_norm
from kimi_k2.ops import mla
from kimi_k2.ops.embedding import rotary_cos_sin
from kimi_k2.ops.experts import noaux_tc_gate


@rows("rows columns", gpu=[(576, 7168), (7168, 1024), (130, 300)], triton=[(300, 200)])
def test_blocks_to_bf16_are_rounded_once(machine: Machine, rows: int, columns: int) -> None:
    """Every code; NaN's too, which the interpreter takes for numbers."""
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8)
    codes[(codes & 127 == 127) & (machine.name == "triton")] = 0
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.01
    weight = codes.view(E4M3)
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    wanted = (weight.float() * wide).to(machine.dtype)
    found = fp8_block_to_bf16(weight.to(machine.device), scale.to(machine.device))
    assert torch.equal(found.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))


@rows("size", gpu=[(512,)])
def test_compiled_and_registered_as_it_is_called(machine: Machine, size: int) -> None:
    """The way through PyTorch's dispatcher, which eager calls do not take: schema, fake, and torch.compile."""
    x, weight = machine.normal(6, size), machine.normal(size)
    torch.library.opcheck(row_norm.registered, (x, weight, 1e-6), test_utils=("test_schema", "test_faketensor"))
    compiled = torch.compile(lambda a, b: row_norm(a, b, 1e-6) * 2, fullgraph=True)
    assert torch.equal(compiled(x, weight), row_norm(x, weight, 1e-6) * 2)


@rows("tokens heads", gpu=[(40, 1), (40, 8), (40, 64)], triton=[(5, 3)])
def test_rotation(machine: Machine, tokens: int, heads: int) -> None:
    x = machine.normal(2, tokens, heads, 192)[..., 128:]
    cos, sin = machine.normal(2, tokens, 32), machine.normal(2, tokens, 32)
    rotated = rotate_pairs(x, cos, sin)
    assert distance(rotated, turned(x, cos[:, :, None], sin[:, :, None])) < machine.limit(ROUNDED_ONCE)


@rows("dtype tokens", gpu=[(torch.bfloat16, 30), (E4M3, 30)], triton=[(torch.float32, 5), (E4M3, 5)])
def test_slots(machine: Machine, dtype: torch.dtype, tokens: int) -> None:
    """A slot a token, none for padding or past the end; e4m3 saturates and rounds as PyTorch does, NaN stays."""
    entries = machine.normal(2, tokens, 576, scale=200)
    if machine.name == "triton" and dtype == E4M3:
        entries = entries.to(E4M3).float() * 4  # the interpreter rounds wrongly, and NaN too
    else:
        entries[1, :, 3] = float("nan")
    cache = torch.randn(2, tokens - 2, 576).to(dtype).to(machine.device)
    positions = torch.stack([torch.randperm(tokens) - 1 for _ in range(2)]).to(machine.device)
    wanted = cache.float()
    stored = entries.float().clamp(-448, 448).to(dtype).float() if dtype == E4M3 else entries.float()
    for b, s in product(range(2), range(tokens)):
        if 0 <= (position := int(positions[b, s])) < cache.shape[1]:
            wanted[b, position] = stored[b, s]
    write_slots(cache, entries, positions)
    assert torch.equal(cache.float().nan_to_num(7e4), wanted.nan_to_num(7e4))


@rows("dtype tokens heads", gpu=[(torch.bfloat16, 300, 8), (E4M3, 300, 64), (torch.bfloat16, 9, 5)], triton=[
    (torch.float32, 5, 3), (E4M3, 4, 1),
])  # fmt: skip
def test_a_prompts_queries_and_entries(machine: Machine, dtype: torch.dtype, tokens: int, heads: int) -> None:
    """What is rotated and normed against float64; stored as `write_slots` does; the rest of the queries stays."""
    q, kv_a = machine.normal(tokens, heads, 192), machine.normal(tokens, 1500 + 576)[:, 1500:]
    norm, (cos, sin) = machine.normal(512, scale=200), machine.normal(2, tokens, 32)
    cache = torch.randn(3, tokens, 576).to(dtype).to(machine.device)
    slots = (torch.randperm(3 * tokens + 9)[:tokens] - 3).to(machine.device)
    slots[-1] = -1
    given, wanted = q.clone(), cache.clone()
    entries = queries_and_entries(given, kv_a, norm, cos, sin, slots, cache, 1e-3)
    assert torch.equal(given[..., :128], q[..., :128])
    assert distance(given[..., 128:], turned(q[..., 128:], cos[:, None], sin[:, None])) < machine.limit(ROUNDED_ONCE)
    latent = kv_a[:, :512].double()
    latent = latent * (latent.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * norm.double()
    made = torch.cat((latent, turned(kv_a[:, 512:], cos, sin)), dim=-1)
    for part in (slice(512), slice(512, None)):
        assert distance(entries[:, part], made[:, part]) < machine.limit(ROUNDED_ONCE)
    write_slots(wanted.view(1, -1, 576), entries[None], slots[None])
    assert torch.equal(cache.float(), wanted.float())


@rows("tokens experts", gpu=[(100, 384), (1500, 256)])
def test_routing_of_many(machine: Machine, tokens: int, experts: int) -> None:
    """Biases that no rounding overrules, so that choices compare; weights against float64."""
    x, weight = machine.normal(tokens, 7168), machine.normal(experts, 7168, scale=0.02)
    bias = 2.0 * torch.randperm(experts, device="cuda").float()
    indices, weights = route(x, weight, bias, 8, norm_topk_prob=True, routed_scaling_factor=2.827)
    logits = x.double() @ weight.double().T
    wanted = noaux_tc_gate(logits, bias.double(), 8, norm_topk_prob=True, routed_scaling_factor=2.827)
    assert torch.equal(indices, wanted[0])
    assert distance(weights, wanted[1]) < 1e-5


@rows("dtype ids rows size", gpu=[(torch.int32, 1000, 300, 7168), (torch.int64, 1000, 300, 7168)], triton=[
    (torch.int32, 20, 5, 300), (torch.int64, 20, 5, 300),
])  # fmt: skip
def test_rows_of_a_rank(machine: Machine, dtype: torch.dtype, ids: int, rows: int, size: int) -> None:
    """Bits of the held rows, zeros for the others."""
    weight = machine.normal(rows + 1, size)[:rows]  # a row behind the last would be taken for one
    given = torch.randint(-2, 3 * rows, (ids,), dtype=dtype, device=machine.device)
    given[:4] = torch.tensor([rows - 1, rows, 2 * rows - 1, 2 * rows])
    here = (given >= rows) & (given < 2 * rows)
    wanted = torch.where(here[:, None], weight[(given.long() - rows).clamp(0, rows - 1)], torch.zeros_like(weight[:1]))
    assert torch.equal(held_rows(given, weight, rows), wanted)
    assert here.any() and not here.all()


@rows("shape", gpu=[((8, 7168),), ((1, 16),), ((77, 1024),)], cpu=[((7, 608),)])
def test_sums_and_products_of_two(machine: Machine, shape: tuple[int, int]) -> None:
    """The bits of PyTorch; infinities and NaN too; the last block ragged. Others are left to it."""
    a, b = machine.normal(*shape, scale=4), machine.normal(*shape, scale=4)
    a[0, :2], b[0, 1] = float("inf"), -float("inf")
    assert torch.equal(pairs.add(a, b).nan_to_num(7.0), (a + b).nan_to_num(7.0))
    gate, up = a.chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    assert torch.equal(pairs.silu_and_mul(a).nan_to_num(7.0), wanted.nan_to_num(7.0))
    if machine.name == "gpu":
        assert pairs.supports_add(a, b)
        assert not any(pairs.supports_add(*two) for two in ((a, b[:, ::2]), (a.float(), b), (a[:, 1:], b[:, 1:])))
        assert pairs.supports_silu_and_mul(a) and not pairs.supports_silu_and_mul(a[:, 8:])


@rows("batch", gpu=[(1,), (64,), (300,)], cpu=[(1,), (7,), (300,)])
def test_next_step_of_sequences_in_pages(machine: Machine, batch: int) -> None:
    """What the plain functions give, again and again; rows of no sequence among the others."""
    lengths = torch.randint(1, 300, (batch,), dtype=torch.int32)
    lengths[1::3] = 0
    ids, table = torch.arange(1, batch + 1, dtype=torch.int32), torch.randint(1, 99, (batch, 7), dtype=torch.int32)
    wanted = lengths, ids, torch.full((batch,), 77), torch.full((batch,), 77), table
    given: Any = tuple(tensor.clone().to(machine.device) for tensor in wanted)
    assert machine.name == "cpu" or mla.next_step.entries[0].takes(*given, 64)
    step = machine.recorded(lambda: step_inputs.places(*given, 64))
    for number in range(3):
        if number or machine.name != "gpu":  # the first is what comes before a capture
            step()
        mla.next_step.plain.call(*wanted, 64)
        assert all(torch.equal(found.cpu(), one) for found, one in zip(given, wanted, strict=True))
    places = given[2].view(1, -1) - 1, given[4][:1], 64  # of one sequence
    assert all(map(torch.equal, step_inputs.token_places(*places), mla.token_places.plain.call(*places)))


@rows("tokens", gpu=[(700,)], cpu=[(5,)])
def test_cosines_and_sines(machine: Machine, tokens: int) -> None:
    """Of positions as far as a model has them; on a GPU the bits of PyTorch."""
    given = torch.arange(tokens, device=machine.device) * 374, machine.normal(32).float(), 1.25, torch.bfloat16
    both = zip(step_inputs.rotary(*given), rotary_cos_sin.plain.call(*given), strict=True)
    assert all(distance(*two) <= (0 if machine.name == "gpu" else ROUNDED_ONCE) for two in both)


@rows("tokens size", gpu=[(1000, 1152)], triton=[(4, 1152), (3, 33), (1, 8)])
def test_residual_sum_and_layer_norm(machine: Machine, tokens: int, size: int) -> None:
    x, delta = (machine.normal(tokens, size, scale=3) + 1 for _ in range(2))
    weight, bias = machine.normal(size), machine.normal(size)
    found, total = add_layer_norm(x, delta, weight, bias, 1e-5)
    assert torch.equal(total, x + delta)
    wanted = torch.nn.functional.layer_norm(total.double(), (size,), weight.double(), bias.double(), 1e-5)
    assert distance(found, wanted) < machine.limit(3e-3)
