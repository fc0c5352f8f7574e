"""The four-bit expert kernel against float64 over the dequantized weights. Needs a Hopper GPU and nvcc."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from four_bits import FORMATS, dense_experts, drawn
from on_hopper import NEEDS_HOPPER, distance, routed

from kimi_k2.bench.kernels.expert_formats import random_int4, random_packed, random_routing
from kimi_k2.kernels.experts.entries import _four_bit_experts, _scales_of_all, prepare_w4a16_experts
from kimi_k2.kernels.experts.w4a16 import moe_w4a16
from kimi_k2.kernels.experts.w4a16_layout import prepare_w4a16
from kimi_k2.ops.experts import ExpertWeights, routed_experts
from kimi_k2.ops.linear import Weight
from kimi_k2.ops.registry import TABLE
from kimi_k2.quantization.int4_group import dequantize_int4_group

pytestmark = NEEDS_HOPPER
H, E = 1024, 32
Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def random_weights(inter: int) -> Weights:
    return (*random_packed(E, 2 * inter, H), *random_packed(E, H, inter))


def dense(packed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return dequantize_int4_group(packed, scale, (packed.shape[0], packed.shape[1] * 8), dtype=dtype)


def reference(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    indices: torch.Tensor,
    scores: torch.Tensor,
    like_bf16: bool = False,
    w2_bf16: bool = False,
) -> torch.Tensor:
    """In float64; `like_bf16`: weights, intermediate and each expert's output rounded to bf16, as a BF16 kernel's."""

    def rounded(v: torch.Tensor, on: bool = like_bf16) -> torch.Tensor:
        return v.bfloat16().double() if on else v

    def expert(rows: torch.Tensor, e: int) -> torch.Tensor:
        w13 = rounded(dense(weights[0][e], weights[1][e]))
        w2 = rounded(dense(weights[2][e], weights[3][e]), like_bf16 or w2_bf16)
        gate, up = (rows @ w13.T).chunk(2, -1)
        return rounded(F.silu(gate) * up) @ w2.T

    return rounded(routed(x, indices, scores, expert, rounded))


CASES = [
    (1, 8, None), (1, 8, [1, 16, 8, 1, 1]), (2, 8, None), (3, 1, None), (4, 16, None),
    (6, 8, None), (8, 8, [1, 16, 4, 1, 2]), (8, 8, [1, 16, 2, 2, 1]), (64, 8, None), (64, 8, [0, 32, 2, 2, 1]),
    (300, 8, [0, 32, 1, 1, 4]), (1000, 8, [0, 64, 1, 1, 2]), (1000, 8, [0, 64, 1, 1, 4]),
    (1000, 8, [0, 128, 1, 1, 1]), (1000, 8, [0, 128, 1, 1, 4]),
    (64, 1, None), (700, 1, None),
]  # fmt: skip


@pytest.mark.parametrize("w2_bf16", [False, True])
@pytest.mark.parametrize("inter", [256, 512])
@pytest.mark.parametrize(("tokens", "top_k", "choice"), CASES)
def test_no_further_from_float64_than_bf16(
    tokens: int, top_k: int, choice: list[int] | None, inter: int, w2_bf16: bool
) -> None:
    torch.manual_seed(tokens + inter)
    weights = random_weights(inter)
    indices, scores = random_routing(tokens, top_k, E)
    if tokens > 2:
        indices[1, 0], scores[tokens - 1] = -1, 0.0  # an invalid pair, and a padded token
        indices[2 : tokens // 2, 0] = 5  # a crowded expert
    x = torch.randn(tokens, H, device="cuda").bfloat16()
    prepared = prepare_w4a16(*weights, w2_bf16=w2_bf16)
    out = moe_w4a16(x, *prepared, indices, scores, choice=choice)
    exact = reference(x, weights, indices, scores)
    bf16 = distance(reference(x, weights, indices, scores, like_bf16=True), exact)
    error = distance(out, exact)
    print(f"T={tokens} k={top_k} I={inter} {choice} w2_bf16={w2_bf16}: {error:.5f}, all in BF16 {bf16:.5f}")
    assert error < 1.02 * bf16
    if tokens > 2:
        assert not out[tokens - 1].any()
    for _ in range(3):
        assert torch.equal(out, moe_w4a16(x, *prepared, indices, scores, choice=choice)), "not deterministic"


@pytest.mark.parametrize("w2_bf16", [False, True])
@pytest.mark.parametrize("inter", [256, 1024])
@pytest.mark.parametrize(
    ("tokens", "choice"),
    [(8, None), (16, None), (13, [1, 16, 1, 1, 2]), (13, [1, 16, 2, 2, 1]), (40, [0, 32, 1, 1, 1])],
)
def test_few_experts_in_more_parts(tokens: int, choice: list[int] | None, inter: int, w2_bf16: bool) -> None:
    """All tokens to the same experts, of which more or fewer make the first stage's items; calls in between to all."""
    torch.manual_seed(tokens + inter)
    weights = random_weights(inter)
    prepared = prepare_w4a16(*weights, w2_bf16=w2_bf16)
    x = torch.randn(tokens, H, device="cuda").bfloat16()
    for top_k in (1, 2, 8):
        indices, scores = random_routing(tokens, top_k, E, same=True)
        exact = reference(x, weights, indices, scores)
        bf16 = distance(reference(x, weights, indices, scores, like_bf16=True), exact)
        out = moe_w4a16(x, *prepared, indices, scores, choice=choice)
        assert distance(out, exact) < 1.02 * bf16
        for _ in range(3):
            moe_w4a16(x, *prepared, *random_routing(tokens, 8, E), choice=choice)
            assert torch.equal(out, moe_w4a16(x, *prepared, indices, scores, choice=choice)), "not deterministic"


@pytest.mark.parametrize("w2_bf16", [False, True])
@pytest.mark.parametrize(
    ("tokens", "top_k", "inter"),
    [(2, 8, 256), (3, 8, 256), (5, 4, 256), (6, 8, 256), (6, 16, 256), (4, 8, 512), (5, 4, 512), (5, 16, 512)],
)
def test_pairs_that_share_an_expert(tokens: int, top_k: int, inter: int, w2_bf16: bool) -> None:
    """All tokens' experts the same, some the same and some pairs invalid, or one expert for every pair."""
    torch.manual_seed(tokens * top_k)
    weights = random_weights(inter)
    prepared = prepare_w4a16(*weights, w2_bf16=w2_bf16)
    x = torch.randn(tokens, H, device="cuda").bfloat16()
    same, scores = random_routing(tokens, top_k, E, same=True)
    some = random_routing(tokens, top_k, E)[0]
    some[:, 0], some[0, 1], some[tokens - 1, top_k - 1] = 7, -1, 7
    crowded = torch.full_like(same, 5)
    for indices in (same, some, crowded):
        exact = reference(x, weights, indices, scores)
        out = moe_w4a16(x, *prepared, indices, scores)
        assert distance(out, exact) < 1.02 * distance(reference(x, weights, indices, scores, like_bf16=True), exact)
        assert torch.equal(out, moe_w4a16(x, *prepared, indices, scores)), "not deterministic"


@pytest.mark.parametrize(("tokens", "inter"), [(2, 1024), (3, 512), (4, 512), (5, 512), (6, 256)])
def test_a_token_has_the_bits_that_it_has_alone(tokens: int, inter: int) -> None:
    """At the model's width, whoever shares its experts: a GEMM's other columns are other tokens."""
    torch.manual_seed(tokens + inter)
    prepared = random_int4(16, inter)
    x = torch.randn(tokens, 7168, device="cuda").bfloat16()
    same, scores = random_routing(tokens, 8, 16, same=True)
    for indices in (same, random_routing(tokens, 8, 16)[0]):
        out = moe_w4a16(x, *prepared, indices, scores)
        for t in range(tokens):
            one = slice(t, t + 1)
            assert torch.equal(out[one], moe_w4a16(x[one], *prepared, indices[one].contiguous(), scores[one]))


@pytest.mark.parametrize("inter", [256, 512])
@pytest.mark.parametrize(
    ("most", "choice"), [(16, [1, 16, 1, 1, 1]), (16, [1, 16, 2, 2, 4]), (32, [0, 32, 1, 1, 1]), (32, [0, 32, 1, 1, 4])]
)
def test_every_number_of_tokens_an_expert(most: int, choice: list[int] | None, inter: int) -> None:
    """Experts of 1 to `most` tokens in random order: none sees what another left in shared memory."""
    torch.manual_seed(most + inter)
    weights = random_weights(inter)
    counts = torch.randperm(most, device="cuda") + 1
    indices = torch.repeat_interleave(torch.arange(most, device="cuda"), counts)[:, None]
    tokens = len(indices)
    indices = indices[torch.randperm(tokens, device="cuda")].contiguous()
    scores = torch.rand(tokens, 1, device="cuda") + 0.5
    x = (torch.randn(tokens, H, device="cuda") * 4.0 ** torch.randint(-4, 5, (tokens, 1), device="cuda")).bfloat16()
    out = moe_w4a16(x, *prepare_w4a16(*weights), indices, scores, choice=choice)
    exact = reference(x, weights, indices, scores)
    bf16 = reference(x, weights, indices, scores, like_bf16=True)
    for expert in range(most):
        mine = indices[:, 0] == expert
        assert distance(out[mine], exact[mine]) < 1.02 * distance(bf16[mine], exact[mine]), int(counts[expert])


def test_a_token_does_not_depend_on_its_tile() -> None:
    """97 to 100 tokens of an expert make three tiles of 32 and one of 1 to 4; which a token comes into is not fixed."""
    torch.manual_seed(1)
    counts = torch.arange(97, 101, device="cuda")
    indices = torch.repeat_interleave(torch.arange(4, device="cuda"), counts)[:, None].contiguous()
    tokens = len(indices)
    x, scores = torch.randn(tokens, H, device="cuda").bfloat16(), torch.rand(tokens, 1, device="cuda") + 0.5
    weights = prepare_w4a16(*random_weights(256))
    first = moe_w4a16(x, *weights, indices, scores, choice=[0, 32, 1, 1, 4])
    for _ in range(9):
        assert torch.equal(first, moe_w4a16(x, *weights, indices, scores, choice=[0, 32, 1, 1, 4]))


def on_gpu(weight: Weight) -> Weight:
    return Weight({suffix: tensor.cuda() for suffix, tensor in weight.tensors.items()}, weight.quantization)


@pytest.fixture(scope="module", params=[*FORMATS])
def four_bits(request: pytest.FixtureRequest) -> tuple[ExpertWeights, torch.Tensor, torch.Tensor]:
    """Experts in the kernel's order, and their float64 weights."""
    experts = drawn(FORMATS[request.param], 16, 256, H)
    gate_up, down = dense_experts(experts)
    made = prepare_w4a16_experts(ExpertWeights(on_gpu(experts.gate_up), on_gpu(experts.down)), torch.bfloat16)
    assert made is not None
    return made, gate_up.cuda(), down.cuda()


@pytest.mark.parametrize(
    ("tokens", "choice"),
    [
        (1, None), (3, None), (6, None), (8, None), (1, [1, 16, 8, 1, 1]), (8, [1, 16, 2, 2, 1]),
        (24, [1, 16, 1, 1, 2]), (40, None),
        (64, [0, 32, 2, 2, 1]), (57, [0, 32, 1, 1, 4]), (300, [0, 64, 1, 1, 2]), (300, [0, 128, 1, 1, 4]),
        (1000, None),
    ],
)  # fmt: skip
def test_every_format(
    four_bits: tuple[ExpertWeights, torch.Tensor, torch.Tensor], tokens: int, choice: list[int] | None
) -> None:
    """As the model calls it (no choice), and each launch pinned; no further from float64 than a BF16 kernel."""
    torch.manual_seed(tokens)
    experts, gate_up, down = four_bits
    indices, scores = random_routing(tokens, 8, 16)
    if tokens > 2:
        indices[1, 0], scores[tokens - 1] = -1, 0.0
        indices[2 : tokens // 2, 0] = 5
    x = torch.randn(tokens, H, device="cuda").bfloat16()

    def expected(like_bf16: bool) -> torch.Tensor:
        def rounded(v: torch.Tensor) -> torch.Tensor:
            return v.bfloat16().double() if like_bf16 else v

        def expert(rows: torch.Tensor, e: int) -> torch.Tensor:
            gate, up = (rows @ rounded(gate_up[e]).T).chunk(2, -1)
            return rounded(F.silu(gate) * up) @ rounded(down[e]).T

        return rounded(routed(x, indices, scores, expert, rounded))

    def call() -> torch.Tensor:
        if choice is None:
            return routed_experts(x, experts, indices, scores)
        given = x, *_four_bit_experts(experts), indices, scores
        pinned: torch.Tensor = moe_w4a16(*given, choice=choice, **_scales_of_all(experts))
        return pinned

    entry = next(one for one in TABLE["routed_experts"].entries if one.name == "moe_w4a16")
    before, out = entry.calls, call()
    assert entry.calls == before + (choice is None)
    exact = expected(False)
    error, bf16 = distance(out, exact), distance(expected(True), exact)
    print(f"{experts.gate_up.quantization} T={tokens} {choice}: {error:.5f}, all in BF16 {bf16:.5f}")
    assert error < 1.02 * bf16
    for _ in range(3):
        assert torch.equal(out, call()), "not deterministic"


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "int4-128"])
@pytest.mark.parametrize("choice", [[1, 16, 1, 1, 1], [0, 32, 1, 1, 4]])
def test_every_number_of_tokens_an_expert_of_other_formats(name: str, choice: list[int]) -> None:
    """Experts of 1 to 16 or 32 tokens in random order, of sizes far apart."""
    torch.manual_seed(choice[1])
    most = choice[1]
    drawn_ones = drawn(FORMATS[name], most, 128, H)
    gate_up, down = (part.cuda() for part in dense_experts(drawn_ones))
    made = prepare_w4a16_experts(ExpertWeights(on_gpu(drawn_ones.gate_up), on_gpu(drawn_ones.down)), torch.bfloat16)
    assert made is not None
    counts = torch.randperm(most, device="cuda") + 1
    indices = torch.repeat_interleave(torch.arange(most, device="cuda"), counts)[:, None]
    tokens = len(indices)
    indices = indices[torch.randperm(tokens, device="cuda")].contiguous()
    scores = torch.rand(tokens, 1, device="cuda") + 0.5
    x = (torch.randn(tokens, H, device="cuda") * 4.0 ** torch.randint(-4, 5, (tokens, 1), device="cuda")).bfloat16()
    out = moe_w4a16(x, *_four_bit_experts(made), indices, scores, choice=choice, **_scales_of_all(made))
    for expert in range(most):
        mine = torch.where(indices[:, 0] == expert)[0]
        wide = x[mine].double()
        gate, up = (wide @ gate_up[expert].T).chunk(2, -1)
        exact = (F.silu(gate) * up) @ down[expert].T * scores[mine].double()
        gate, up = (wide @ gate_up[expert].bfloat16().double().T).chunk(2, -1)
        y = (F.silu(gate) * up).bfloat16().double() @ down[expert].bfloat16().double().T * scores[mine].double()
        # Weights are exact here: where few values make a sum, what an e4m3 MMA cuts off shows (1.15 on an H100).
        assert distance(out[mine], exact) < 1.25 * distance(y.bfloat16(), exact), int(counts[expert])
