"""The CUDA kernels for a few tokens, compiled for the host over a stand-in for CUDA's threads, against float64.

Everything but the memory and tensor instructions is the code that runs on the GPU: indices, shared memory and its size,
barriers, shuffles, masks, sums.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from four_bits import FORMATS, dense_experts, drawn
from four_bits import arguments as four_bit_arguments
from torch import Tensor

from kimi_k2.kernels.attention import query
from kimi_k2.kernels.common.build import KERNELS, source_of
from kimi_k2.kernels.experts import fp8_decode, w4a16
from kimi_k2.kernels.experts.w4a16_layout import FORMATS as KINDS
from kimi_k2.kernels.experts.w4a16_layout import format_of, prepare_w4a16
from kimi_k2.kernels.linear.fused_linear import DECODE_COLUMNS
from kimi_k2.ops.mla import next_step
from kimi_k2.quantization.mxfp4 import unpack_e2m1

COMPILER = shutil.which("g++")
FLAGS = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-DKIMI_K2_CUDA_ON_CPU", "-x", "c++")
ROUNDED_ONCE = 1.8e-3  # to BF16, in the mean of squares; twice: 2.3e-3
STAND_IN = Path(__file__).with_name("cuda_on_cpu.h")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


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


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    directory = tmp_path_factory.mktemp("on_cpu")
    whole = directory / "whole.cpp"
    names = (
        "linear/linear_decode", "rowwise/add_norm", "attention/value_rows", "experts/fp8_decode", "attention/query",
        "attention/attend_values", "attention/absorb", "rowwise/pairs", "rowwise/next_step", "experts/w4a16_decode",
    )  # fmt: skip
    whole.write_text("".join(f'#include "{source_of(name)}"\n' for name in names) + CODES)
    assert COMPILER is not None
    flags = (*FLAGS, f"-I{KERNELS}", "-include", str(STAND_IN))
    command = [COMPILER, *flags, "-o", str(directory / "whole.so"), str(whole)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(directory / "whole.so"))


def pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def unwritten(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()


def dense(weight: Tensor, scale: Tensor) -> Tensor:
    wide = scale.double().repeat_interleave(128, -2)[..., : weight.shape[-2], :]
    return weight.double() * wide.repeat_interleave(128, -1)


CASES = [(1, 11, columns, fp8, True, True) for columns in DECODE_COLUMNS for fp8 in (True, False)] + [
    (3, 10, 7168, True, True, True), (4, 140, 1024, True, False, False), (2, 9, 1536, True, True, False),
    (3, 9, 2048, False, True, True), (8, 20, 7168, True, True, True), (5, 33, 1536, True, False, True),
    (7, 20, 256, True, False, False), (3, 1041, 7168, True, True, True),
    (5, 20, 512, True, True, True), (4, 9, 2304, True, True, False), (6, 11, 4096, True, False, True),
    (8, 33, 2048, True, True, False), (13, 35, 1536, True, True, False),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "rows", "columns", "fp8", "with_norm", "with_delta"), CASES)
def test_product(
    library: ctypes.CDLL, tokens: int, rows: int, columns: int, fp8: bool, with_norm: bool, with_delta: bool
) -> None:
    torch.manual_seed(columns)
    x = torch.randn(tokens, columns + 64).bfloat16()[:, :columns]  # rows may be strided
    delta = torch.randn(tokens, columns).bfloat16() if with_delta else None
    norm = (torch.rand(columns) + 0.5).bfloat16() if with_norm else None
    weight = (torch.randn(rows, columns) * 20).to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    scale = torch.rand(-(-rows // 128), columns // 128) * 0.01 + 0.01 if fp8 else None
    out, total = unwritten(tokens, rows), unwritten(tokens, columns) if with_delta else None
    pointers = [pointer(t) for t in (x, delta, weight, scale, norm, out, total)]
    assert library.kimi_linear_decode(*pointers, tokens, rows, columns, x.stride(0), ctypes.c_float(1e-6), None) == 0
    summed = x.double() if delta is None else x.double() + delta.double()
    if delta is not None and total is not None:
        assert torch.equal(total, x + delta)
    wide = weight.double() if scale is None else dense(weight, scale)
    wanted = (summed if norm is None else normed(summed, norm)) @ wide.T
    assert distance(out, wanted) < 5e-3


def test_product_of_values_outside_float16(library: ctypes.CDLL) -> None:
    """Blocks of 128 columns far above and far below float16's range, one of zeros, one of a single large value."""
    torch.manual_seed(1)
    x = torch.randn(2, 1024)
    for block, exponent in enumerate((60, -60, 30, 17, -30, 0, 0, 0)):
        x[:, 128 * block : 128 * block + 128] *= 2.0**exponent
    x[:, 640:768] = 0
    x[:, 768] = 3e4
    weight = (torch.randn(3, 1024) * 20).to(torch.float8_e4m3fn)
    # Scales that make every block count.
    scale = torch.tensor([[2.0**-60, 2.0**60, 2.0**-30, 2.0**-17, 2.0**30, 1.0, 1e-4, 1.0]])
    out, given = unwritten(2, 3), x.bfloat16()
    pointers = [pointer(t) for t in (given, None, weight, scale, None, out, None)]
    assert library.kimi_linear_decode(*pointers, 2, 3, 1024, 1024, ctypes.c_float(1e-6), None) == 0
    assert distance(out, given.double() @ dense(weight, scale).T) < 3e-3


@pytest.mark.parametrize("columns", [1024, 7168, 8192])
def test_residual_and_norm(library: ctypes.CDLL, columns: int) -> None:
    x, delta = (torch.randn(2, columns).bfloat16() for _ in range(2))
    weight = (torch.rand(columns) + 0.5).bfloat16()
    total, out = unwritten(2, columns), unwritten(2, columns)
    pointers = [pointer(t) for t in (x, delta, weight, total, out, None)]
    assert library.kimi_add_norm(*pointers, 2, columns, columns, ctypes.c_float(1e-6), None) == 0
    assert torch.equal(total, x + delta)
    summed = x.double() + delta.double()
    assert distance(out, normed(summed, weight)) < ROUNDED_ONCE
    apart, inverse = unwritten(2, columns), torch.full((2,), float("nan"))
    pointers = [pointer(t) for t in (x, delta, weight, total, apart, inverse)]
    assert library.kimi_add_norm(*pointers, 2, columns, columns, ctypes.c_float(1e-6), None) == 0
    assert torch.equal(apart, (summed * weight.double()).bfloat16())
    assert distance(apart.double() * inverse.double()[:, None], normed(summed, weight)) < ROUNDED_ONCE


def test_values(library: ctypes.CDLL) -> None:
    """Of a few tokens a row a warp, of more several; the same bits."""
    latent, w_uv = torch.randn(19, 2, 512).bfloat16(), torch.randn(2, 20, 512).bfloat16()
    few, many = unwritten(3, 40), unwritten(19, 40)
    for out in (few, many):
        assert library.kimi_value_rows(pointer(latent), pointer(w_uv), pointer(out), len(out), 2, 20, None) == 0
    assert distance(many, torch.einsum("bhr,hvr->bhv", latent.double(), w_uv.double()).flatten(1)) < 2.5e-3
    assert torch.equal(few, many[:3])


@pytest.mark.parametrize("fp8", [False, True])
def test_query_and_entry(library: ctypes.CDLL, fp8: bool) -> None:
    """A slot inside the cache, and two tokens whose slot lies outside."""
    torch.manual_seed(5)
    tokens, heads, capacity = 3, 2, 5
    scale = torch.rand(heads * 192 // 128, 12) * 0.01 + 0.01
    weight = torch.randn(heads * 192, 1536) * (20 if fp8 else 0.3)
    weight = weight.to(torch.float8_e4m3fn if fp8 else torch.bfloat16)
    exact = dense(weight, scale) if fp8 else weight.double()
    qkv, q_norm, kv_norm = torch.randn(tokens, 2112), torch.rand(1536) + 0.5, torch.rand(512) + 0.5
    angles, w_uk = torch.rand(tokens, 32) * 6, torch.randn(heads, 128, 512) * 0.05
    x, q_norm, kv_norm, cos, sin, w_uk = (
        t.bfloat16() for t in (qkv, q_norm, kv_norm, angles.cos(), angles.sin(), w_uk)
    )
    cache, out = torch.randn(tokens, capacity, 576).bfloat16(), unwritten(tokens, heads, 576)
    before, slots = cache.clone(), torch.tensor([9, -1, tokens * capacity])
    arguments = query.Arguments(
        kv_norm, cos, sin, slots, w_uk, cache, out, tokens, heads, tokens * capacity, qkv_a=x, q_norm=q_norm,
        q_b=weight, q_b_scale=scale if fp8 else None, q_eps=1e-6, kv_eps=1e-6,
    )  # fmt: skip
    assert library.kimi_query(ctypes.byref(arguments), None) == 0
    q = (normed(x[:, :1536], q_norm) @ exact.T).view(tokens, heads, 192)
    turn = torch.complex(cos.double(), sin.double())

    def rotate(t: Tensor, by: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * by)

    latent = torch.einsum("bhn,hnr->bhr", q[..., :128], w_uk.double())
    wanted = torch.cat((latent, rotate(q[..., 128:], turn[:, None]).flatten(-2)), -1)
    assert distance(out[..., :512], wanted[..., :512]) < 5e-3
    assert distance(out[..., 512:], wanted[..., 512:]) < 5e-3
    entry = torch.cat((normed(x[:, 1536:2048], kv_norm), rotate(x[:, 2048:].double(), turn).flatten(-2)), -1)
    written = (1, 4)
    assert distance(cache[written], entry[0]) < 4e-3
    cache[written] = before[written]
    assert torch.equal(cache, before)


def test_absorbed_queries(library: ctypes.CDLL) -> None:
    """More tokens than a block takes; a token has the bits that it has alone; outside the cache nothing is stored."""
    torch.manual_seed(6)
    tokens, heads, capacity = 21, 2, 5
    norm, w_uk = torch.rand(512).bfloat16() + 0.5, (torch.randn(heads, 128, 512) * 0.05).bfloat16()
    q, qkv = torch.randn(tokens, heads * 192).bfloat16(), torch.randn(tokens, 2112).bfloat16()
    angles = torch.rand(tokens, 32) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    positions = torch.arange(tokens) % (capacity + 2) - 1

    def call(chosen: list[int]) -> tuple[Tensor, Tensor]:
        cache, out = torch.zeros(len(chosen), capacity, 576).bfloat16(), unwritten(len(chosen), heads, 576)
        some = [tensor[chosen].contiguous() for tensor in (q, qkv, cos, sin)]
        inside = (positions[chosen] >= 0) & (positions[chosen] < capacity)
        slots = torch.where(
            inside, positions[chosen] + torch.arange(len(chosen)) * capacity, positions[chosen].sign() * 999
        )
        sizes = len(chosen), heads, len(chosen) * capacity, 2112, 1e-6
        given = norm, *some[2:], slots, w_uk, cache, out, *sizes, some[0], some[1][:, 1536:]
        arguments = query.AbsorbArguments(*given)
        assert library.kimi_absorb(ctypes.byref(arguments), None) == 0
        return out, cache

    out, cache = call(list(range(tokens)))
    by_head, turn = q.double().view(tokens, heads, 192), torch.complex(cos.double(), sin.double())

    def rotate(t: Tensor, by: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * by).flatten(-2)

    latent = torch.einsum("bhn,hnr->bhr", by_head[..., :128], w_uk.double())
    assert distance(out[..., :512], latent) < 2.5e-3
    assert distance(out[..., 512:], rotate(by_head[..., 128:], turn[:, None])) < 2.5e-3
    entries = torch.cat((normed(qkv[:, 1536:2048], norm), rotate(qkv[:, 2048:].double(), turn)), -1)
    for token, position in enumerate(positions.tolist()):
        inside = 0 <= position < capacity
        assert distance(cache[token, position], entries[token]) < 4e-3 if inside else not cache[token].any()
    for one in (0, 15, 16, 20):
        alone = call([one])
        assert torch.equal(alone[0][0], out[one]) and torch.equal(alone[1][0], cache[one])


@pytest.mark.parametrize(("splits", "heads"), [(1, 2), (16, 2), (37, 2), (128, 2), (128, 17), (5, 17)])
def test_joined_values(library: ctypes.CDLL, splits: int, heads: int) -> None:
    """Parts that were never written, and a token without context; clusters of eight blocks and of four."""
    torch.manual_seed(splits)
    tokens = 2
    parts, sums = torch.randn(tokens, heads, splits, 512), torch.randn(tokens, heads, splits) * 3
    sums[1, 1] = -torch.inf
    sums[0, :, splits // 2 :: 3] = -torch.inf
    sums[0, :, 0] = 1.0
    parts[sums == -torch.inf] = torch.nan
    w_uv, out = torch.randn(heads, 128, 512).bfloat16(), unwritten(tokens, heads * 128)
    call = library.kimi_join_values
    assert call(pointer(parts), pointer(sums), pointer(w_uv), pointer(out), None, tokens, heads, splits, 0, None) == 0
    share = torch.nan_to_num((sums.double() * 0.6931471805599453).softmax(-1))
    latent = torch.einsum("bhs,bhsr->bhr", share, parts.double().nan_to_num())
    assert distance(out, torch.einsum("bhr,hvr->bhv", latent, w_uv.double()).flatten(1)) < 4e-3
    assert not out[1, 128:256].any()


@pytest.mark.parametrize(("some_parts", "heads"), [(0, 2), (5, 2), (0, 5)])
def test_joined_values_of_a_plan(library: ctypes.CDLL, some_parts: int, heads: int) -> None:
    """Requests of many parts, one and none, whose items lie one after another, all heads of an item together.

    With `some_parts` in the steps of another kernel: three kinds of requests, by their parts.
    """
    torch.manual_seed(3)
    counts = [37, 1, 0, 128, 4, 5, 32]
    items = sum(counts)
    parts, sums = torch.randn(items, heads, 512), torch.randn(items, heads) * 3
    plan = torch.full((2 * len(counts), 4), -1, dtype=torch.int32)
    firsts = [sum(counts[:request]) for request in range(len(counts))]
    plan[len(counts) :, 0], plan[len(counts) :, 1] = torch.tensor(firsts), torch.tensor(counts)
    w_uv, out = torch.randn(heads, 128, 512).bfloat16(), unwritten(len(counts), heads * 128)
    pointers = [pointer(tensor) for tensor in (parts, sums, w_uv, out, plan)]
    assert library.kimi_join_values(*pointers, len(counts), heads, 1, some_parts, None) == 0
    for request, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        share = (sums[first : first + count].double() * 0.6931471805599453).softmax(0)
        latent = torch.einsum("sh,shr->hr", share, parts[first : first + count].double())
        wanted = torch.einsum("hr,hvr->hv", latent, w_uv.double()).flatten()
        assert distance(out[request], wanted) < 4e-3 if count else not out[request].any()


def random_weights(*lead: int, inter: int, hidden: int) -> list[Tensor]:
    shapes = (2 * inter, hidden), (hidden, inter)
    made = []
    for rows, columns in shapes:
        made.append((torch.randn(*lead, rows, columns) * 60).clamp(-448, 448).to(torch.float8_e4m3fn))
        made.append((torch.rand(*lead, rows // 128, columns // 128) + 0.5) * (0.02 / 60))
    return made


def expert(x: Tensor, weights: list[Tensor]) -> Tensor:
    gate, up = (x @ dense(weights[0], weights[1]).T).chunk(2, -1)
    return (F.silu(gate) * up) @ dense(weights[2], weights[3]).T


@pytest.mark.parametrize(
    ("tokens", "top_k", "inter", "with_shared", "mapped"),
    [(1, 2, 128, True, False), (2, 3, 128, False, True), (1, 8, 384, True, False)],
)
def test_experts(library: ctypes.CDLL, tokens: int, top_k: int, inter: int, with_shared: bool, mapped: bool) -> None:
    """An invalid pair, a weight of zero, experts of other ranks; the second launch's loop goes round more than once."""
    torch.manual_seed(inter + tokens)
    held, hidden = 9, 1024
    weights = random_weights(held, inter=inter, hidden=hidden)
    shared = random_weights(inter=inter, hidden=hidden) if with_shared else []
    count = 2 * held if mapped else held
    expert_map = torch.arange(count, dtype=torch.int32) - held // 2 if mapped else None
    if expert_map is not None:
        expert_map[(expert_map < 0) | (expert_map >= held)] = -1
    indices, scores = torch.rand(tokens, count).topk(top_k).indices, torch.rand(tokens, top_k)
    if tokens > 1:
        indices[1, 0], scores[0, top_k - 1] = -1, 0.0
    x, out = torch.randn(tokens, hidden).bfloat16(), unwritten(tokens, hidden)
    scratch = unwritten(tokens * (top_k + with_shared) * inter, dtype=torch.float32)
    given = (x, indices, scores, expert_map, *weights, *(shared or (None,) * 4), scratch, out)
    arguments = fp8_decode.Arguments(*given)
    arguments.tokens, arguments.top_k, arguments.experts, arguments.hidden = tokens, top_k, held, hidden
    arguments.inter, arguments.num_global, arguments.ids64 = inter, count, 1
    assert library.kimi_experts_decode(ctypes.byref(arguments), None) == 0
    wanted = expert(x.double(), shared) if shared else torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for slot in range(top_k):
            number = int(indices[token, slot])
            local = number if expert_map is None or number < 0 else int(expert_map[number])
            if local >= 0:
                one = expert(x[token : token + 1].double(), [w[local] for w in weights])
                wanted[token] += one[0] * scores[token, slot].double()
    assert distance(out, wanted) < 2.5e-3


# The others take a minute: KIMI_K2_SLOW=1.
FEW = [("nvfp4-packed", 1, 1, 128)]
MANY = [(name, *sizes) for name in FORMATS for sizes in ((1, 2, 128), (5, 3, 384))]


@pytest.mark.parametrize(("name", "tokens", "top_k", "inter"), MANY if os.environ.get("KIMI_K2_SLOW") else FEW)
def test_four_bit_experts(library: ctypes.CDLL, name: str, tokens: int, top_k: int, inter: int) -> None:
    """One token, and tokens that share experts, an invalid pair and a weight of zero among theirs."""
    torch.manual_seed(inter)
    held, hidden = 3, 1024
    experts = drawn(FORMATS[name], held, inter, hidden)
    gate_up, down = dense_experts(experts)
    (w13, s13, w2, s2), more = four_bit_arguments(experts)
    prepare_w4a16(w13, s13, w2, s2, in_place=True)
    indices = torch.stack([torch.randperm(held)[:top_k] for _ in range(tokens)])
    scores = torch.rand(tokens, top_k)
    if tokens > 1:
        indices[1, 0], scores[0, 1] = -1, 0.0
    x, out = torch.randn(tokens, hidden).bfloat16(), unwritten(tokens, hidden)
    scratch = unwritten(tokens * top_k * inter)
    whole = more.get("gate_up_proj_all"), more.get("down_proj_all")
    arguments = w4a16.DecodeArguments(x, indices, scores, None, w13, s13, w2, s2, scratch, out, *whole)
    arguments.tokens, arguments.top_k, arguments.experts, arguments.hidden = tokens, top_k, held, hidden
    arguments.inter, arguments.num_global, arguments.ids64 = inter, held, 1
    arguments.format, arguments.divides = KINDS.index(format_of(w13, s13)), more.get("divides", 0)
    assert library.kimi_w4a16_decode(ctypes.byref(arguments), None) == 0
    wanted = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for number, score in zip(indices[token].tolist(), scores[token].double(), strict=True):
            if number >= 0:
                gate, up = (gate_up[number] @ x[token].double()).chunk(2)
                wanted[token] += score * (down[number] @ (F.silu(gate) * up))
    # INT4's weights are rounded to BF16; those of four-bit floats are exact.
    assert distance(out, wanted) < (4e-3 if "int4" in name else 3e-3)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_four_bit_floats_as_e4m3(library: ctypes.CDLL, name: str) -> None:
    """Every value by every scale, exactly: what the kernel of more tokens multiplies, and by what its sums."""
    nvfp4 = name == "nvfp4"
    scales = torch.arange(0 if nvfp4 else 40, 127 if nvfp4 else 200, dtype=torch.uint8)
    count, each = len(scales), 16 if nvfp4 else 8
    # Of a row of bytes each, the first is row g's of a part, the second the other row's.
    rows = torch.stack([scales.roll(place) for place in range(each)], dim=1).contiguous()
    values = torch.arange(16, dtype=torch.uint8)
    nibbles = torch.stack([values[(torch.arange(count) + place) % 16] for place in range(8)], dim=1)
    words = (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).contiguous().view(torch.int32)
    out = torch.empty(count, 8, 2, 4)
    library.take(1 + nvfp4, pointer(words), pointer(rows), count, pointer(out))
    wide = rows.view(torch.float8_e4m3fn).float() if nvfp4 else torch.exp2(rows.float() - 127)
    by_part = wide.view(count, 8, 2) if nvfp4 else wide.view(count, 4, 2).repeat_interleave(2, 1)
    codes = unpack_e2m1(words.view(torch.uint8)).view(count, 4, 2).transpose(1, 2)
    assert torch.equal(out, by_part[..., None] * codes[:, None])


def test_sums_and_products_of_two(library: ctypes.CDLL) -> None:
    """More values than a block's, the last block ragged; the bits of PyTorch."""
    a, b = ((torch.randn(7, 608) * 4).bfloat16() for _ in range(2))
    total, product = unwritten(7, 608), unwritten(7, 304)
    assert library.kimi_pairs(pointer(a), pointer(b), pointer(total), a.numel() // 8, 1, None) == 0
    assert torch.equal(total, a + b)
    assert library.kimi_pairs(pointer(a), None, pointer(product), product.numel() // 8, 304 // 8, None) == 0
    gate, up = a.chunk(2, dim=-1)
    assert torch.equal(product, F.silu(gate) * up)


@pytest.mark.parametrize("batch", [1, 7, 300])
def test_next_step(library: ctypes.CDLL, batch: int) -> None:
    """The bits of the plain function; rows of no sequence among the others."""
    torch.manual_seed(batch)
    lengths = torch.randint(0, 300, (batch,), dtype=torch.int32)
    lengths[batch // 2 :: 3] = 0
    ids, table = torch.randint(1, 999, (batch,), dtype=torch.int32), torch.randint(1, 99, (batch, 5), dtype=torch.int32)
    given = lengths, ids, torch.full((batch,), 77), torch.full((batch,), 77), table
    one, two, three, four, _ = wanted = tuple(tensor.clone() for tensor in given)
    next_step(one, two, three, four, table, 64)
    assert library.kimi_next_step(*map(pointer, given), batch, 5, 64, None) == 0
    assert all(map(torch.equal, given, wanted))
