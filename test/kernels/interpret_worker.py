"""Runs our Triton kernels in Triton's interpreter on a CPU and prints their relative errors against float64 as JSON.

A process of its own: what `TRITON_INTERPRET` says is read when a kernel is defined. Operands are float32 (the
interpreter multiplies no bfloat16): what is compared is the arithmetic, the indices and the masks, not the rounding.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from kimi_k2.kernels.attention import flash_prefill, mla_prefill
from kimi_k2.kernels.experts import bf16 as moe_bf16
from kimi_k2.kernels.linear import fused_linear_triton
from kimi_k2.kernels.rowwise import decode_triton as rope_cache_triton
from kimi_k2.kernels.rowwise import prefill_triton as rowwise_triton


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())).flatten(-2)


def prefill(queries: int, slots: int) -> float:
    """The end of a prompt, whose last position is past the cache; a shorter one with padding before it.

    What no query sees is NaN in the cache.
    """
    heads, launch = 2, (32, 16, 4, 2)
    nope, rope = torch.randn(2, heads, queries, 128).transpose(1, 2), torch.randn(2, queries, heads, 64)
    expanded, cache = torch.randn(2, heads, slots, 256), torch.randn(2, slots, 576)
    positions = torch.stack((torch.arange(slots - queries, slots), torch.arange(queries) - 5))
    positions[0, -1] += 5
    cache[1, queries - 5 :] = expanded[1, :, queries - 5 :] = float("nan")
    out = mla_prefill.run(nope, rope, expanded, cache, positions, 0.1, launch)
    worst = 0.0
    for b in range(2):
        for query, position in enumerate(positions[b].clamp(min=0).tolist()):
            keys, values = expanded[b, :, : position + 1].double().split([128, 128], dim=-1)
            scores = torch.einsum("hd,htd->ht", nope[b, query].double(), keys)
            scores = (scores + rope[b, query].double() @ cache[b, : position + 1, 512:].double().T) * 0.1
            worst = max(worst, error(out[b, query], torch.einsum("ht,htv->hv", scores.softmax(-1), values)))
    return worst


def joined() -> float:
    """Strided parts, more tokens than a block has; 0 or 1."""
    left, right = torch.randn(2, 3, 70, 256)[..., :128].transpose(1, 2), torch.randn(2, 70, 3, 64)
    whole = torch.randn(2, 70, 3, 192)
    together = flash_prefill.join(*whole.split([128, 64], dim=-1))
    assert torch.equal(together, whole) and together.data_ptr() == whole.data_ptr(), "nothing is copied"
    return float(not torch.equal(flash_prefill.join(left, right), torch.cat((left, right), dim=-1)))


def keys_and_values() -> float:
    """More slots than a block has, two sequences of a longer cache."""
    cache, kv_b = torch.randn(2, 80, 576)[:, :70], torch.randn(3, 256, 512)
    keys, values = flash_prefill.keys_and_values(cache, kv_b)
    expanded = torch.einsum("btr,hvr->bthv", cache[..., :512].double(), kv_b.double())
    rotated = cache[:, :, None, 512:].expand(-1, -1, 3, -1)
    wanted = torch.cat((expanded[..., :128], rotated.double()), dim=-1)
    return max(error(keys, wanted), error(values, expanded[..., 128:]))


def product(with_norm: bool, fp8: bool, splits: int, chunk: int) -> float:
    tokens, rows, columns = 3, 40, 1024
    x, norm = torch.randn(tokens, columns), torch.rand(columns) + 0.5 if with_norm else None
    weight = (torch.randn(rows, columns) * 20).to(torch.float8_e4m3fn) if fp8 else torch.randn(rows, columns)
    scale = torch.rand(1, columns // 128) if fp8 else None
    parts, out = torch.empty(splits, tokens, rows), torch.empty(tokens, rows)
    fused_linear_triton.gemm[(3, splits)](
        x, weight, scale, norm, out if splits == 1 else parts, tokens, rows, 1e-6,
        COLUMNS=columns, SPLITS=splits, ROWS=16, CHUNK=chunk,
    )  # fmt: skip
    if splits > 1:
        fused_linear_triton.add[(1,)](parts, out, tokens * rows, SPLITS=splits, WIDTH=128)
    wide = weight.double() if scale is None else weight.double() * scale.double().repeat_interleave(128, 1)
    return error(out, (x.double() if norm is None else normed(x, norm)) @ wide.T)


def absorb(codes: float) -> dict[str, float]:
    """Stored in float32, scaled as codes are: the interpreter rounds to e4m3 wrongly (carries are lost)."""
    batch, heads = 3, 2
    q, kv, w_uk = torch.randn(batch, heads * 192), torch.randn(batch, 600)[:, 24:], torch.randn(heads, 128, 512)
    norm, cos, sin, slots = (
        torch.rand(512),
        torch.randn(batch, 32),
        torch.randn(batch, 32),
        torch.tensor([14, -1, 6]),
    )
    query, cache = torch.empty(batch, heads, 576), torch.randn(batch, 5, 576)
    before, second = cache.double(), cache.clone()
    rope_cache_triton.absorb[(heads * 8 + heads + 1, batch)](
        q, kv, norm, cos, sin, slots, w_uk, query, cache, kv.stride(0), 15, 1e-6, codes,
        HEADS=heads, NOPE=128, ROPE=64, RANK=512, WIDTH=64, OVERLAP=False, FIRST=0,
    )  # fmt: skip
    nope, rope = q.view(batch, heads, 192).split([128, 64], dim=-1)
    latent = torch.einsum("bhn,hnr->bhr", nope.double(), w_uk.double())
    wanted = torch.cat((latent, rotate(rope, cos[:, None], sin[:, None])), dim=-1)
    entries = torch.cat((normed(kv[:, :512], norm), rotate(kv[:, 512:], cos, sin)), dim=-1)
    before[2, 4], before[1, 1] = entries[0] * codes, entries[2] * codes
    together = query.clone()
    together[..., :512] = float("nan")
    rope_cache_triton.absorb_tokens[(heads * 8, 1)](
        q, w_uk, together, batch, HEADS=heads, NOPE=128, ROPE=64, RANK=512, WIDTH=64, TOKENS=16, OVERLAP=False
    )
    grouped = torch.empty_like(query)
    rope_cache_triton.absorb_groups[(heads * 16 + 16, 1)](
        q, kv, norm, cos, sin, slots, w_uk, grouped, second, batch, kv.stride(0), 15, 1e-6, codes,
        HEADS=heads, NOPE=128, ROPE=64, RANK=512, WIDTH=32, TOKENS=16, OVERLAP=False,
    )  # fmt: skip
    kind = f"codes={codes}"
    return {
        f"absorb tokens together {kind}": error(together, wanted),
        f"absorb query in groups {kind}": error(grouped, wanted),
        f"absorb cache in groups {kind}": error(second, before),
        f"absorb query {kind}": error(query, wanted),
        f"absorb cache {kind}": error(cache, before),
    }


def add_norm() -> dict[str, float]:
    x, delta, weight = torch.randn(2, 300), torch.randn(2, 300), torch.rand(300)
    total, out = torch.empty_like(x), torch.empty_like(x)
    rope_cache_triton.add_norm[(2,)](x, delta, weight, total, out, 300, 1e-6, WIDTH=512)
    return {
        "add_norm sum": error(total, x.double() + delta.double()),
        "add_norm": error(out, normed(x + delta, weight)),
    }


def rowwise() -> dict[str, float]:
    """Ragged blocks, strided rows and heads, slots outside the cache."""
    weight, scale = (torch.randn(300, 200) * 20).to(torch.float8_e4m3fn), torch.rand(3, 2)
    values = torch.empty(300, 200)
    rowwise_triton.dequantize[(10, 2)](weight, scale, values, 300, 200, 2, ROWS=32, WIDTH=128)
    blocks = scale.double().repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :200]
    x, norm = torch.randn(3, 500)[:, 100:400], torch.rand(300)
    quotients = torch.empty(3, 300)
    rowwise_triton.norm[(3,)](x, norm, quotients, 500, 300, 1e-6, WIDTH=512)
    heads = torch.randn(2, 5, 3, 96)[..., 32:]
    cos, sin, rotated = torch.randn(2, 5, 32), torch.randn(2, 5, 32), torch.empty(2, 5, 3, 64)
    strides = heads.stride()[:3]
    rowwise_triton.rotate[(10,)](heads, cos, sin, rotated, 5, 3, *strides, *rotated.stride()[:3], PAIRS=32, HEADS=4)
    given = heads.clone()
    rowwise_triton.rotate[(10,)](heads, cos, sin, heads, 5, 3, *strides, *strides, PAIRS=32, HEADS=4)
    assert torch.equal(heads, rotated), "in place"
    entries, positions = torch.randn(2, 3, 72) * 4, torch.tensor([[6, 0, -1], [-1, 7, 3]])
    cache = torch.randn(2, 7, 72)
    before = cache.double()
    rowwise_triton.store[(6,)](entries, positions, cache, 3, 7, 72, 5.0, WIDTH=128)
    for b, s in ((0, 0), (0, 1), (1, 2)):
        before[b, positions[b, s]] = entries[b, s].double().clamp(-5, 5)
    broken = torch.full((2, 3, 72), float("nan"))
    kept = torch.zeros(2, 7, 72)
    rowwise_triton.store[(6,)](broken, positions, kept, 3, 7, 72, 5.0, WIDTH=128)
    assert kept[0, 6].isnan().all(), "a NaN stays one"
    ids, rows, held = torch.tensor([3, 9, 4, -1, 8], dtype=torch.int32), torch.randn(5, 300), torch.empty(5, 300)
    rowwise_triton.embed[(5,)](ids, rows, held, 4, 5, 300, WIDTH=512)
    wanted = torch.stack([rows[i - 4] if 4 <= i < 9 else torch.zeros(300) for i in ids.tolist()])
    return {
        "rowwise embed": error(held, wanted.double()),
        "rowwise dequantize": error(values, weight.double() * blocks),
        "rowwise norm": error(quotients, normed(x, norm)),
        "rowwise rotate": error(rotated, rotate(given, cos[:, :, None], sin[:, :, None])),
        "rowwise store": error(cache, before),
    }


def sorted_pairs(pairs: int, launches: list[moe_bf16.Pass], parallel: bool, most_few: int) -> float:
    """Each expert's pairs are those that PyTorch finds, in its blocks of its pass alone; 0.0, or 1.0 if not."""
    count = 5
    held = torch.tensor([1, -1, 0, 3, -1, -1, 4], dtype=torch.int32) if parallel else None
    indices = torch.randint(-1, 8, (pairs, 1))
    indices[: pairs // 2] = 2
    known = count if held is None else len(held)
    local = indices.flatten().where((indices.flatten() >= 0) & (indices.flatten() < known), known)
    local = torch.cat((torch.arange(count) if held is None else held.long(), torch.tensor([-1])))[local]
    local = local.where(local >= 0, count)
    moe_bf16.MAX_FEW = most_few
    found = moe_bf16.sort_pairs(indices, held, count, launches)
    same = [torch.equal(found.local.long(), local)]
    limits = [one.least for one in launches] + [2**31]
    for (how, least), most, blocks in zip(launches, limits[1:], found.blocks, strict=True):
        used = 0
        for expert in range(count):
            start, number = int(found.starts[expert]), int(found.counts[expert])
            mine = found.pairs[start : start + number].sort().values
            same.append(torch.equal(mine, torch.where(local == expert)[0]))
            first = start // how.rows + min(start // least, expert)
            wanted = -(-number // how.rows) if least <= number < most else 0
            same.append(bool((blocks[first : first + wanted] == expert).all()))
            used += wanted
        same.append(int((blocks != count).sum()) == used)
    return float(not all(same))


def experts(passes: list[moe_bf16.Pass], parallel: bool, most_few: int = 1024) -> float:
    """More pairs of an expert than a block's, an expert without any, an invalid pair, a token without a held one."""
    tokens, top_k, count, hidden, inter = 21, 2, 5, 256, 128
    x, scores = torch.randn(tokens, hidden), torch.rand(tokens, top_k)
    weights = torch.randn(count, 2 * inter, hidden) * 0.1, torch.randn(count, hidden, inter) * 0.1
    indices = torch.rand(tokens, 4).topk(top_k).indices
    indices[3, 0], indices[:, 1] = -1, 2
    held = torch.tensor([1, -1, 0, 3, -1, -1, 4], dtype=torch.int32) if parallel else None
    out = torch.full((tokens, hidden), torch.nan)
    moe_bf16.MAX_FEW = most_few
    moe_bf16.run(x, indices, scores, out, *weights, held, passes)
    wanted = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for slot in range(top_k):
            number = int(indices[token, slot])
            number = number if held is None or number < 0 else int(held[number])
            if number >= 0:
                gate, up = (weights[0][number].double() @ x[token].double()).chunk(2)
                hidden_values = torch.nn.functional.silu(gate) * up
                wanted[token] += scores[token, slot] * (weights[1][number].double() @ hidden_values)
    return error(out, wanted)


def main() -> None:
    torch.manual_seed(0)
    errors: dict[str, float] = {}
    errors |= {f"prefill S={s} T={t}": prefill(s, t) for s, t in ((40, 40), (37, 90))}
    errors |= {"joined queries": joined(), "keys and values": keys_and_values()}
    for with_norm, fp8, splits, chunk in ((True, True, 1, 512), (False, True, 4, 128), (True, False, 2, 512)):
        errors[f"product norm={with_norm} fp8={fp8} splits={splits}"] = product(with_norm, fp8, splits, chunk)
    errors |= absorb(1.0) | absorb(2.5)
    one = {rows: [moe_bf16.Pass(moe_bf16.Launch(rows, 32, 4, 1))] for rows in (16, 32)}
    two = [*one[16], moe_bf16.Pass(moe_bf16.Launch(32, 64, 4, 1), 20)]
    alike = [*one[16], moe_bf16.Pass(moe_bf16.Launch(16, 32, 4, 1), 9)]
    errors |= {
        f"experts rows={rows} parallel={p}": experts(one[rows], p) for rows, p in ((16, False), (16, True), (32, True))
    }
    errors["experts sorted by three launches"] = experts(one[16], True, most_few=0)
    errors |= {f"experts in two passes, parallel={p}": experts(two, p, most_few=30) for p in (False, True)}
    errors["experts in two passes of equal rows"] = experts(alike, False)
    errors |= {
        f"order of {n} pairs, {len(passes)} passes, parallel={p}, few={few}": sorted_pairs(n, passes, p, few)
        for n, passes, p, few in (
            (1, one[16], False, 1024), (37, one[16], True, 1024), (100, one[32], False, 1024), (100, two, True, 1024),
            (100, alike, False, 1024), (37, one[16], True, 0), (1500, two, False, 0),
        )
    }  # fmt: skip
    print(json.dumps(errors | add_norm() | rowwise()))


if __name__ == "__main__":
    main()
