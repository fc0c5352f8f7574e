"""What a machine without a GPU can see of the kernels for a few tokens: shapes, refusals, the interfaces to CUDA."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention import query
from kimi_k2.kernels.attention.attend_values import attend_values
from kimi_k2.kernels.attention.value_rows import batched_value_rows, value_rows
from kimi_k2.kernels.common import build
from kimi_k2.kernels.experts import fp8_decode as moe_decode
from kimi_k2.kernels.experts import w4a16 as moe_w4a16
from kimi_k2.kernels.experts import w4a16_few
from kimi_k2.kernels.experts.w4a16_layout import FORMATS
from kimi_k2.kernels.linear.fused_linear import DECODE_COLUMNS, fused_add_linear
from kimi_k2.kernels.router.norm_route import add_norm_route, route_norm
from kimi_k2.kernels.rowwise.decode import add_norm_apart, norm_apart

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
TOKENS, HIDDEN, INTER, EXPERTS = 3, 1024, 256, 4


def arguments() -> dict[str, Tensor | None]:
    def weights(*lead: int) -> list[Tensor]:
        shapes = (2 * INTER, HIDDEN), (2 * INTER // 128, HIDDEN // 128), (HIDDEN, INTER), (HIDDEN // 128, INTER // 128)
        return [torch.empty(*lead, *s, dtype=torch.float32 if i % 2 else E4M3) for i, s in enumerate(shapes)]

    names = ("gate_up_proj", "gate_up_proj_scale_inv", "down_proj", "down_proj_scale_inv")
    shared = ("shared_gate_up", "shared_gate_up_scale_inv", "shared_down", "shared_down_scale_inv")
    return {
        "x": torch.empty(TOKENS, HIDDEN, dtype=BF16),
        **dict(zip(names, weights(EXPERTS), strict=True)),
        "topk_indices": torch.zeros(TOKENS, 2, dtype=torch.int64),
        "topk_weights": torch.zeros(TOKENS, 2),
        "expert_map": None,
        **dict(zip(shared, weights(), strict=True)),
    }


def query_arguments(tokens: int = 2, heads: int = 8, capacity: int = 70) -> dict[str, Tensor | float]:
    rows = heads * 192
    return {
        "qkv_a": torch.empty(tokens, 2112, dtype=BF16),
        "q_norm": torch.empty(1536, dtype=BF16),
        "q_b": torch.empty(rows, 1536, dtype=E4M3),
        "q_b_scale_inv": torch.empty(rows // 128, 12),
        "kv_norm": torch.empty(512, dtype=BF16),
        "cos": torch.empty(tokens, 32, dtype=BF16),
        "sin": torch.empty(tokens, 32, dtype=BF16),
        "slots": torch.zeros(tokens, dtype=torch.int64),
        "w_uk": torch.empty(heads, 128, 512, dtype=BF16),
        "cache": torch.empty(tokens, capacity, 576, dtype=BF16),
        "q_eps": 1e-6,
        "kv_eps": 1e-6,
    }


def test_fake_shapes_of_joined_launches() -> None:
    with FakeTensorMode():
        found = query.query_and_entry(**query_arguments())
        assert (found.shape, found.dtype) == ((2, 8, 576), BF16)
        cache, lengths = torch.empty(2, 70, 576, dtype=BF16), torch.zeros(2, dtype=torch.int32)
        assert attend_values(found, cache, lengths, torch.empty(8, 128, 512, dtype=BF16), 0.1).shape == (2, 1024)
        x, weight = torch.empty(3, 512, dtype=BF16), torch.empty(64, 512, dtype=BF16)
        total, normed, indices, weights = add_norm_route(x, x, x[0], 1e-6, weight, torch.empty(64), 8)
        assert total.shape == normed.shape == x.shape
        assert (indices.shape, indices.dtype, weights.dtype) == ((3, 8), torch.int64, torch.float32)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("qkv_a", torch.empty(5, 2112, dtype=BF16), "cos"),
        ("q_b", torch.empty(8 * 192, 1536, dtype=BF16), "q_b is torch.bfloat16"),
        ("cache", torch.empty(2, 70, 576, dtype=E4M3), "cache is"),
        ("slots", torch.zeros(2, dtype=torch.int32), "slots is"),
    ],
)
def test_query_refuses(name: str, value: Tensor, message: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(KernelError, match=message):
        query.query_and_entry(**(query_arguments() | {name: value}))


def test_refusals_of_joined_launches() -> None:
    with FakeTensorMode():
        with pytest.raises(KernelError, match="5 tokens"):
            query.query_and_entry(**query_arguments(5))
        with pytest.raises(KernelError, match="w_uv"):
            cache, lengths = torch.empty(1, 70, 576, dtype=BF16), torch.zeros(1, dtype=torch.int32)
            attend_values(torch.empty(1, 8, 576, dtype=BF16), cache, lengths, torch.empty(8, 64, 512, dtype=BF16), 0.1)
        x, weight = torch.empty(3, 512, dtype=BF16), torch.empty(64, 512, dtype=BF16)
        with pytest.raises(KernelError, match=r"\[T, H\]"):
            add_norm_route(x, x[:2], x[0], 1e-6, weight, torch.empty(64), 8)
        with pytest.raises(KernelError, match="e_score_correction_bias"):
            add_norm_route(x, x, x[0], 1e-6, weight, torch.empty(32), 8)


def test_fake_shapes() -> None:
    with FakeTensorMode():
        assert moe_decode.moe_decode(**arguments()).shape == (TOKENS, HIDDEN)
        assert moe_decode.moe_decode(**{k: v for k, v in arguments().items() if "shared" not in k}).dtype == BF16
        x, weight = torch.empty(2, 7168, dtype=BF16), torch.empty(2112, 7168, dtype=E4M3)
        out, total = fused_add_linear(x, x, weight, torch.empty(17, 56), x[0], 1e-6)
        assert (out.shape, total.shape) == ((2, 2112), x.shape)
        assert value_rows(torch.empty(2, 8, 512, dtype=BF16), torch.empty(8, 128, 512, dtype=BF16)).shape == (2, 1024)


def test_pairs_are_taken_one_by_one_while_their_intermediates_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank of TP8, TP4, TP2, TP1, EP8 and EP4: experts per token and their width."""
    monkeypatch.setattr(moe_decode, "is_hopper", lambda device: True)
    monkeypatch.setattr(moe_decode, "find_nvcc", lambda: "nvcc")

    def most(top_k: int, inter: int) -> int:
        return sum(moe_decode.supports(n, top_k, 7168, inter, torch.device("cuda")) for n in range(1, 10))

    sizes = (8, 256), (8, 512), (8, 1024), (8, 2048), (1, 2048), (2, 2048)
    assert [most(*size) for size in sizes] == [4, 2, 1, 1, 4, 2]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("shared_down", torch.empty(HIDDEN, 128, dtype=E4M3), "tensor 2"),
        ("shared_gate_up_scale_inv", None, "tensor 1 is None"),
        ("topk_indices", torch.zeros(TOKENS, 17, dtype=torch.int64), "topk_weights"),
        ("x", torch.empty(TOKENS, 512, dtype=BF16), "gate_up_proj"),
    ],
)
def test_refusals(name: str, value: Tensor | None, message: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(KernelError, match=message):
        moe_decode.moe_decode(**(arguments() | {name: value}))


def test_other_refusals() -> None:
    with FakeTensorMode():
        x = torch.empty(2, 256, dtype=BF16)
        with pytest.raises(KernelError, match="delta"):
            fused_add_linear(x, x[:1], torch.empty(128, 256, dtype=E4M3), torch.empty(1, 2), x[0], 1e-6)
        with pytest.raises(KernelError, match="512"):
            value_rows(torch.empty(2, 8, 256, dtype=BF16), torch.empty(8, 128, 256, dtype=BF16))


def test_few_tokens_with_the_bits_of_many() -> None:
    """Shapes of the results, and what is refused."""
    given = arguments()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert moe_decode.moe_decode(**given, parts=[2, 4, 1]).shape == (TOKENS, HIDDEN)
        with pytest.raises(KernelError, match="three"):
            moe_decode.moe_decode(**given, parts=[2, 4])
        one = {name: given[name][:, :1] for name in ("topk_indices", "topk_weights")}  # type: ignore[index]
        with pytest.raises(KernelError, match="3 tokens of 2 experts"):
            moe_decode.moe_decode(**(given | {name: t.contiguous() for name, t in one.items()}), parts=[2, 4, 1])
        heads, cache = 2, torch.empty(TOKENS, 7, 576, dtype=BF16)
        angles, at = torch.empty(TOKENS, 32, dtype=BF16), torch.zeros(TOKENS, dtype=torch.int64)
        rest = cache[0, 0, :512], angles, angles, at, torch.empty(heads, 128, 512, dtype=BF16), cache, 1e-6
        q, kv_a = torch.empty(TOKENS, heads * 192, dtype=BF16), torch.empty(TOKENS, 2112, dtype=BF16)[:, 1536:]
        assert query.absorb(q, kv_a, *rest).shape == (TOKENS, heads, 576)
        with pytest.raises(KernelError, match="kv_a is"):
            query.absorb(q, kv_a[:, :512], *rest)


def test_norms_whose_quotients_are_apart() -> None:
    """Shapes of the results, and what is refused."""
    with FakeTensorMode():
        x, norm = torch.empty(2, 512, dtype=BF16), torch.empty(512, dtype=BF16)
        total, scaled, inverse = add_norm_apart(x, x, norm, 1e-6)
        assert total.shape == scaled.shape == x.shape and (inverse.shape, inverse.dtype) == ((2,), torch.float32)
        strided = torch.empty(2, 2112, dtype=BF16)[:, :512]
        assert norm_apart(strided, norm, 1e-6)[0].is_contiguous()
        assert [tuple(made.shape) for made in route_norm(x, x, norm, 1e-6)] == [(2, 512)] * 3 + [(2,)]
        with pytest.raises(KernelError, match="16 bytes"):
            norm_apart(torch.empty(2, 515, dtype=BF16)[:, :512], norm, 1e-6)


def test_int4_experts_of_few_tokens() -> None:
    """Shapes of the results, and what is refused."""
    with FakeTensorMode():
        packed = [
            torch.empty(EXPERTS, 2 * INTER, HIDDEN // 8, dtype=torch.int32),
            torch.empty(EXPERTS, HIDDEN, INTER // 8, dtype=torch.int32),
        ]
        scales = [
            torch.empty(EXPERTS, 2 * INTER, HIDDEN // 32, dtype=BF16),
            torch.empty(EXPERTS, HIDDEN, INTER // 32, dtype=BF16),
        ]
        x, chosen, weights = (
            torch.empty(TOKENS, HIDDEN, dtype=BF16),
            torch.zeros(TOKENS, 2, dtype=torch.int64),
            torch.zeros(TOKENS, 2),
        )
        held = packed[0], scales[0], packed[1], scales[1]
        assert w4a16_few.moe_w4a16_few(x, *held, chosen, weights, 2).shape == (TOKENS, HIDDEN)
        shared = torch.empty(2 * INTER, HIDDEN, dtype=BF16), torch.empty(HIDDEN, INTER, dtype=BF16)
        for refused, message in (
            ((chosen, weights, 9), "9 parts"),
            ((chosen[:, :1].contiguous(), weights[:, :1].contiguous(), 2), "3 tokens of 1 experts"),
            ((chosen, weights, 2, None, shared[0]), "both or none"),
            ((chosen, weights, 2, None, *shared), "in 8 parts and one"),
        ):
            with pytest.raises(KernelError, match=message):
                w4a16_few.moe_w4a16_few(x, *held, *refused)


def test_the_widths_are_those_that_have_an_instance() -> None:
    def cases(source: str, switch: str) -> list[int]:
        text = build.source_of(source).read_text()
        return [int(width) for width in re.findall(r"case (\d+):", text[text.index(switch) :])]

    assert cases("linear/linear_decode", "switch (a.columns)") == 2 * list(DECODE_COLUMNS)  # FP8, BF16
    assert cases("experts/fp8_decode", "switch (a->hidden)") == list(moe_decode.HIDDEN)
    known = [*moe_w4a16.DECODE_HIDDEN, *range(len(FORMATS))]
    assert cases("experts/w4a16_decode", "switch (a.hidden)") == known


@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_batched_value_rows(tokens: int) -> None:
    latent, w_uv = torch.randn(tokens, 8, 512), torch.randn(8, 128, 512)
    wanted = torch.einsum("bhr,hvr->bhv", latent.double(), w_uv.double()).flatten(1)
    found = batched_value_rows(latent, w_uv)
    assert found.shape == (tokens, 1024) and found.is_contiguous()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-4)
