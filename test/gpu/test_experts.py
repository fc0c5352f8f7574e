"""Routed experts of every stored form against float64: every launch, each kind of routing, ranks' shares, graphs."""

from __future__ import annotations

import ctypes
import os
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from e4m3 import rounded
from exact import bf16, distance, mixture, routing
from machines import Machine, library, rows
from on_hopper import assert_graph_follows
from stored_experts import FORMATS, Experts, drawn, of
from torch import Tensor

from kimi_k2.kernels.experts import bf16 as moe_bf16
from kimi_k2.kernels.experts.bf16 import Launch, Pass
from kimi_k2.kernels.experts.entries import (
    experts_beside_shared,
    prepare_w4a16_experts,
    shared_added_to_routed,
)
from kimi_k2.kernels.experts.fp8_decode import moe_decode
from kimi_k2.ops import registry
from kimi_k2.ops.experts import routed_experts, routed_experts_with_shared
from kimi_k2.quantization.mxfp4 import unpack_e2m1

BF16 = dict.fromkeys(("weights", "middle", "outputs"), bf16)
# BF16's own rounding of the result alone gives 1.7e-3.
LIMITS = {"decode": 2.5e-3, "bf16": 5e-3}


def made(machine: Machine, kind: str, experts: int, inter: int, hidden: int) -> Experts:
    """`decode` has FP8 blocks too."""
    given = of(drawn("fp8" if kind == "decode" else kind, experts, inter, hidden, machine.device, machine.dtype))
    return given._replace(operation=moe_decode) if kind == "decode" else given


FP8 = [
    (1, 8, None), (8, 8, [1, 16, 4, 1, 2]), (8, 8, [1, 16, 2, 2, 1]), (64, 8, None), (64, 8, [0, 32, 2, 2, 1]),
    (300, 8, [0, 32, 1, 1, 4]), (1000, 8, [0, 64, 1, 1, 2]), (1000, 8, [0, 128, 1, 1, 1]),
    (340, 8, [0, 128, 1, 1, 1]), (64, 1, None), (700, 1, None), (2700, 1, [0, 128, 1, 1, 2]),
    (1000, 8, [0, 128, 1, 2, 4]), (700, 1, [0, 128, 1, 2, 1]),
    (1000, 8, [0, 256, 1, 1, 1]), (340, 8, [0, 256, 1, 2, 4]), (64, 8, [0, 256, 1, 1, 1]),
    (2700, 1, [0, 256, 1, 1, 2]), (700, 1, [0, 256, 1, 2, 1]),
    (2100, 8, [0, 32, 1, 1, 2]),  # more outputs of pairs than the L2 keeps: summed slab after slab
]  # fmt: skip
INT4 = [
    (1, 8, None), (1, 8, [1, 16, 8, 1, 1]), (2, 8, None), (3, 1, None), (4, 16, None),
    (6, 8, None), (8, 8, [1, 16, 4, 1, 2]), (8, 8, [1, 16, 2, 2, 1]), (64, 8, None), (64, 8, [0, 32, 2, 2, 1]),
    (300, 8, [0, 32, 1, 1, 4]), (1000, 8, [0, 64, 1, 1, 2]), (1000, 8, [0, 64, 1, 1, 4]),
    (1000, 8, [0, 128, 1, 1, 1]), (1000, 8, [0, 128, 1, 1, 4]), (64, 1, None), (700, 1, None),
]  # fmt: skip
OTHERS = [
    (1, None), (3, None), (6, None), (8, None), (1, [1, 16, 8, 1, 1]), (8, [1, 16, 2, 2, 1]), (24, [1, 16, 1, 1, 2]),
    (40, None), (64, [0, 32, 2, 2, 1]), (57, [0, 32, 1, 1, 4]), (300, [0, 64, 1, 1, 2]), (300, [0, 128, 1, 1, 4]),
    (1000, None),
]  # fmt: skip
# Of few experts more or fewer make the first stage's items.
FEW = [(8, None), (16, None), (13, [1, 16, 1, 1, 2]), (13, [1, 16, 2, 2, 1]), (40, [0, 32, 1, 1, 1])]
SHARING = [(2, 8, 256), (3, 8, 256), (5, 4, 256), (6, 8, 256), (6, 16, 256), (4, 8, 512), (5, 4, 512), (5, 16, 512)]
EACH = [(16, [1, 16, 1, 1, 1]), (16, [1, 16, 2, 2, 4]), (32, [0, 32, 1, 1, 1]), (32, [0, 32, 1, 1, 4])]
CROWDED = [(12, 1), (32, 1), (64, 2), (300, 1), (300, 2), (1500, 1), (5000, 1)]
PACKED = "int4", "int4 w2_bf16"
ON_GPU: list[tuple[Any, ...]] = [
    *(("fp8", "drawn", t, k, (32, i, 1024), c) for (t, k, c), i in product(FP8, (256, 512))),
    *((one, "drawn", t, k, (32, i, 1024), c) for one, (t, k, c), i in product(PACKED, INT4, (256, 512))),
    *((one, "drawn", t, 8, (16, 256, 1024), c) for one, (t, c) in product(FORMATS, OTHERS)),
    *((one, "same", t, k, (32, i, 1024), c) for one, (t, c), k, i in product(PACKED, FEW, (1, 2, 8), (256, 1024))),
    *((one, how, t, k, (32, i, 1024), None)
      for one, how, (t, k, i) in product(PACKED, ("same", "some", "crowded"), SHARING)),
    *(("int4", "each", 0, 1, (most, i, 1024), c) for (most, c), i in product(EACH, (256, 512))),
    *((one, "each", 0, 1, (most, 128, 1024), c)
      for one, (most, c) in product(("mxfp4", "nvfp4", "int4-128"), EACH[::3])),
    *(("bf16", "drawn", t, 8, (32, i, 1024), None) for t, i in product((1, 7, 64, 300, 2000), (128, 512))),
    *(("bf16", how, t, k, (32, 256, 1024), None) for how, (t, k) in product(("third", "same"), CROWDED)),
    *((f"decode{more}", "drawn", t, k, (20, i, h), None)
      for more, (t, k), (h, i) in product(("", " shared"), ((1, 8), (2, 8), (4, 8), (8, 8), (3, 1), (1, 16)),
                                          ((1024, 128), (1024, 640), (7168, 256), (7168, 2048)))),
]  # fmt: skip
# The others take a minute: KIMI_K2_SLOW=1.
SLOW = [(one, "drawn", *sizes, None) for one in FORMATS for sizes in ((1, 2, (3, 128, 1024)), (5, 4, (5, 384, 1024)))]
ON_CPU = [
    ("decode shared", "drawn", 1, 2, (9, 128, 1024), None), ("decode mapped", "drawn", 2, 3, (9, 128, 1024), None),
    ("decode shared", "drawn", 1, 8, (9, 384, 1024), None),
    ("nvfp4-packed", "drawn", 1, 1, (3, 128, 1024), None),
    *((one, "drawn", 1, 2, (3, 256, 1024), None) for one in PACKED),  # blocks and chunks of every matrix: their order
    *(SLOW if os.environ.get("KIMI_K2_SLOW") else ()),
]  # fmt: skip
SMALL, WIDE = (Pass(Launch(rows, 32, 4, 1)) for rows in (16, 32))
TWO, ALIKE = [SMALL, Pass(Launch(32, 64, 4, 1), 20)], [SMALL, Pass(Launch(16, 32, 4, 1), 9)]
# Passes, and pairs that one launch sorts at most.
INTERPRETED = [
    ("bf16", ([SMALL], 1024)), ("bf16 mapped", ([SMALL], 1024)), ("bf16 mapped", ([WIDE], 1024)),
    ("bf16 mapped", ([SMALL], 0)), ("bf16", (TWO, 30)), ("bf16 mapped", (TWO, 30)), ("bf16", (ALIKE, 1024)),
]  # fmt: skip


@rows(
    "kind how tokens top_k sizes choice", gpu=ON_GPU, cpu=ON_CPU,
    triton=[(kind, "drawn", 41, 2, (6, 128, 256), choice) for kind, choice in INTERPRETED],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:no tuned choices")
@pytest.mark.memory(8)
def test_experts(
    machine: Machine, kind: str, how: str, tokens: int, top_k: int, sizes: tuple[int, int, int], choice: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """`choice` pins the launch. No further from float64 than what rounds as the kernel documents."""
    name, _, more = kind.partition(" ")
    experts, inter, hidden = sizes
    given = made(machine, kind if more == "w2_bf16" else name, *sizes)
    known, device, extra = experts, machine.device, dict[str, Any]()
    held: Tensor | None = None
    if more == "mapped":  # every other expert of the model is another rank's
        known, held = 2 * experts, torch.full((2 * experts,), -1, dtype=torch.int32, device=device)
        held[1::2] = torch.arange(experts, dtype=torch.int32, device=device)
        held = torch.cat((held, torch.zeros_like(held)))[:known]  # what lies behind it is no map
    indices, scores = routing(how, tokens, top_k, known, device)
    if name == "bf16" and how == "drawn":
        indices[tokens // 2, 0] = known  # an expert of no model
    local = indices if held is None else held[indices.clamp(0, known - 1)].long()
    local = torch.where((indices >= 0) & (indices < known), local, -1)
    x = machine.normal(len(indices), hidden)
    if how == "each":  # of sizes far apart
        x *= 4.0 ** torch.randint(-4, 5, (len(x), 1), device=device)
    if machine.name == "triton":
        passes, most = choice
        monkeypatch.setattr(moe_bf16, "choose_passes", lambda *_: passes)
        monkeypatch.setattr(moe_bf16, "MAX_FEW", most)
        made_empty = {"empty": lambda *size, **how: torch.full(size, experts + 1, **how)}
        monkeypatch.setattr(moe_bf16, "torch", SimpleNamespace(**vars(torch) | made_empty))
        sort = moe_bf16.sort_pairs

        def whole(*given: Any) -> moe_bf16.Order:
            """Every pair and every block has an expert, or says that it has none."""
            order = sort(*given)
            assert all(one.max() <= experts for one in (order.local, *order.blocks))
            return order

        monkeypatch.setattr(moe_bf16, "sort_pairs", whole)
    elif choice is not None:
        extra = {"choice": choice}
    shared = made(machine, name, 1, inter, hidden) if more == "shared" else None
    if shared is not None:
        names = "shared_gate_up", "shared_gate_up_scale_inv", "shared_down", "shared_down_scale_inv"
        extra = dict(zip(names, (tensor[0] for tensor in shared.weights), strict=True))
    out = given(x, indices, scores, held, **extra)

    def wanted(**rounding: Any) -> Tensor:
        total = mixture(x, local, scores, given.matrices, **rounding)
        if shared is not None:
            total += mixture(x, torch.zeros_like(local[:, :1]), torch.ones_like(scores[:, :1]), shared.matrices)
        return total

    exact = wanted()
    each = [local[:, 0] == expert for expert in range(experts)] if how == "each" else [slice(None)]
    if name in LIMITS:
        assert distance(out, exact) < machine.limit(LIMITS[name])
    elif name == "fp8":
        same = wanted(tokens=rounded, middle=rounded)
        cost = distance(same, exact)  # what rounding the activations to e4m3 costs by itself
        # The tensor cores keep about 14 bits of an e4m3 sum, which moves some intermediates over an e4m3 step.
        assert distance(out, same) < cost and distance(out, exact) < 1.15 * cost
    else:
        in_bf16 = wanted(**BF16)
        # Weights of other formats are exact: where few values make a sum, what an e4m3 MMA cuts off shows.
        most = 1.02 if how != "each" or name == "int4" else 1.25
        for mine in each:
            assert distance(out[mine], exact[mine]) < most * distance(in_bf16[mine], exact[mine])
    assert shared is not None or not out[(scores * (local >= 0)).sum(-1) == 0].any()
    for _ in range(3 if machine.name == "gpu" else 1):
        given(x, *routing("drawn", len(x), indices.shape[1], known, device), held, **extra)
        assert torch.equal(out, given(x, indices.int(), scores, held, **extra)), "not deterministic"


@rows("tokens inter", gpu=[(2, 1024), (3, 512), (4, 512), (5, 512), (6, 256)])
def test_a_token_has_the_bits_that_it_has_alone(machine: Machine, tokens: int, inter: int) -> None:
    """At the model's width, whoever shares its experts: a GEMM's other columns are other tokens."""
    given, x = made(machine, "int4", 9, inter, 7168), machine.normal(tokens, 7168)
    for how in ("same", "whole"):
        indices, scores = routing(how, tokens, 8, 9, "cuda")
        out = given(x, indices, scores)
        for one in torch.arange(tokens).split(1):
            assert torch.equal(out[one], given(x[one], indices[one], scores[one]))


@rows("counts", gpu=[([97, 98, 99, 100],)])
def test_a_token_does_not_depend_on_its_tile(machine: Machine, counts: list[int]) -> None:
    """97 to 100 tokens of an expert make three tiles of 32 and one of 1 to 4; which a token comes into is not fixed."""
    indices = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))[:, None].cuda()
    x, scores = machine.normal(len(indices), 1024), torch.rand(len(indices), 1, device="cuda") + 0.5
    given, choice = made(machine, "int4", 32, 256, 1024), [0, 32, 1, 1, 4]
    first = given(x, indices, scores, choice=choice)
    assert all(torch.equal(first, given(x, indices, scores, choice=choice)) for _ in range(9))


@rows("kind tokens", gpu=[("fp8", 40), ("int4", 40), ("bf16", 40), ("decode", 4)])
def test_expert_parallel_ranks_sum_to_the_whole(machine: Machine, kind: str, tokens: int) -> None:
    given, chosen = made(machine, kind, 32, 256, 1024), routing("whole", tokens, 8, 32, "cuda")
    x, total = machine.normal(tokens, 1024), torch.zeros(tokens, 1024, device="cuda")
    for rank in range(2):
        held = slice(16 * rank, 16 * rank + 16)
        mine = torch.full((32,), -1, dtype=torch.int32, device="cuda")
        mine[held] = torch.arange(16, device="cuda", dtype=torch.int32)
        part = given._replace(weights=tuple(weight[held].contiguous() for weight in given.weights))
        total += part(x, *chosen, mine).float()
    assert distance(total, given(x, *chosen)) < 5e-3


@rows("kind tokens choice", gpu=[
    ("fp8", 4, None), ("fp8", 300, None), ("fp8", 2100, [0, 32, 1, 1, 2]), ("int4", 4, None), ("int4", 30, None),
    ("int4", 300, [0, 32, 1, 1, 4]), ("int4", 1000, [0, 128, 1, 1, 4]), ("bf16", 33, None), ("decode", 2, None),
])  # fmt: skip
def test_graph_replay_follows_its_inputs(machine: Machine, kind: str, tokens: int, choice: list[int] | None) -> None:
    """Also where other launches sort before and sum after: nothing of the routing before is left in any scratch."""
    operation, x = made(machine, kind, 32, 256, 1024), machine.normal(tokens, 1024)
    chosen = routing("whole", tokens, 8, 32, "cuda")
    more: dict[str, Any] = {} if choice is None else {"choice": choice}

    def refresh() -> None:
        for old, new in zip((x, *chosen), (torch.randn_like(x), *routing("whole", tokens, 8, 32, "cuda")), strict=True):
            old.copy_(new)

    assert_graph_follows(lambda: (operation(x, *chosen, **more),), refresh)


@rows("kind tokens name", gpu=[
    ("bf16", 33, "moe_bf16"), ("fp8", 33, "moe_fp8"), ("decode", 3, "moe_decode"),
    *((one, 5, "moe_w4a16") for one in FORMATS),
])  # fmt: skip
def test_the_table_takes_it(machine: Machine, kind: str, tokens: int, name: str) -> None:
    """As the model calls it: the bits of the operation."""
    given, x = made(machine, kind, 32, 256, 1024), machine.normal(tokens, 1024)
    chosen = routing("whole", tokens, 8, 32, "cuda")
    held = prepare_w4a16_experts(given.stored, torch.bfloat16) or given.stored
    registry.pin("")
    assert routed_experts.choose(x, held, *chosen).name == name
    assert torch.equal(routed_experts(x, held, *chosen), given(x, *chosen))


@rows("kind tokens", gpu=[("fp8", 1024), ("fp8", 5000), ("bf16", 1100)], cpu=[("fp8", 3), ("bf16", 3)])
def test_shared_expert_added_by_its_product(machine: Machine, kind: str, tokens: int) -> None:
    """No farther from float64 than a sum behind it."""
    held, alone = (drawn(kind, count, 256, 1024, machine.device) for count in (8, 1))
    shared = alone.gate_up.expert(0), alone.down.expert(0)
    x, chosen = machine.normal(tokens, 1024), routing("whole", tokens, 2, 8, machine.device)
    given = x, held, *chosen, *shared
    registry.pin("")
    wanted = "adding_product" if machine.name == "gpu" else registry.PLAIN
    assert routed_experts_with_shared.choose(*given).name == wanted
    ones = torch.zeros_like(chosen[0][:, :1]), torch.ones_like(chosen[1][:, :1])
    exact = routed_experts(*given[:4]).double() + mixture(x, *ones, of(alone).matrices)
    found, behind = (together(*given) for together in (shared_added_to_routed, experts_beside_shared))
    assert distance(found, exact) < min(5e-3, 1.02 * distance(behind, exact))


CODES = """
#include "experts/csrc/w4a16_formats.cuh"
using namespace w4a16;
template <class F>
void take(const uint32_t* words, const typename F::Row* rows, int count, float* out) {
  for (int i = 0; i < count; ++i)
    for (int part = 0; part < 8; ++part) {
      uint32_t code[2];
      float times[2];
      F::codes(code[0], code[1], words[i]);
      F::times(rows[i], part / 2, part % 2, times[0], times[1]);
      for (int row = 0; row < 2; ++row)
        for (int byte = 0; byte < 4; ++byte)
          *out++ = on_cpu::e4m3(code[row] >> (8 * byte) & 0xff) * times[row] * F::kSum * 512.f;
    }
}
extern "C" void take(int format, const uint32_t* words, const void* rows, int count, float* out) {
  if (format == 1) take<Mxfp4>(words, static_cast<const Mxfp4::Row*>(rows), count, out);
  else take<Nvfp4>(words, static_cast<const Nvfp4::Row*>(rows), count, out);
}
"""


@rows("name", cpu=[("mxfp4",), ("nvfp4",)])
def test_four_bit_floats_as_e4m3(machine: Machine, name: str) -> None:
    """Every value by every scale, exactly: what the kernel of more tokens multiplies, and by what its sums."""
    nvfp4 = name == "nvfp4"
    scales = torch.arange(0 if nvfp4 else 40, 127 if nvfp4 else 200, dtype=torch.uint8)
    count, each = len(scales), 16 if nvfp4 else 8
    # Of a row of bytes each, the first is row g's of a part, the second the other row's.
    by_row = torch.stack([scales.roll(place) for place in range(each)], dim=1).contiguous()
    values = torch.arange(16, dtype=torch.uint8)
    nibbles = torch.stack([values[(torch.arange(count) + place) % 16] for place in range(8)], dim=1)
    words = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).contiguous().view(torch.int32)
    out = torch.empty(count, 8, 2, 4)
    first, second, target = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (words, by_row, out))
    library("experts/w4a16_decode", more=CODES).take(1 + nvfp4, first, second, count, target)
    wide = by_row.view(torch.float8_e4m3fn).float() if nvfp4 else torch.exp2(by_row.float() - 127)
    by_part = wide.view(count, 8, 2) if nvfp4 else wide.view(count, 4, 2).repeat_interleave(2, 1)
    codes = unpack_e2m1(words.view(torch.uint8)).view(count, 4, 2).transpose(1, 2)
    assert torch.equal(out, by_part[..., None] * codes[:, None])
