"""Weights folded ahead of a layer: closer to exact, at the real width, than what the ordinary BF16 graph computes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kimi_k2.config import KimiK2Config
from kimi_k2.model.linear import RMSNorm
from kimi_k2.ops.experts import noaux_tc_gate
from kimi_k2.quantization.stored import format_of
from kimi_k2.sharding import early_qkv_a, early_router

HIDDEN, EPS = 7168, 1e-6


class Drawn(NamedTuple):
    """BF16 residual [T, H], what ranks multiply [T, K], output projection [H, K], gamma [H], weight behind [N, H]."""

    residual: Tensor
    inner: Tensor
    out: Tensor
    gamma: Tensor
    behind: Tensor

    def exact(self) -> Tensor:
        """In float64."""
        x = self.residual.double() + self.inner.double() @ self.out.double().T
        return F.rms_norm(x, (HIDDEN,), self.gamma.double(), EPS) @ self.behind.double().T

    def ordinary(self, ranks: int) -> tuple[Tensor, Tensor]:
        """Each rank's part, their sum, the residual stream and the norm are BF16: the stream, and what is behind it."""
        each = zip(self.inner.chunk(ranks, dim=1), self.out.chunk(ranks, dim=1), strict=True)
        sums = [(value.float() @ weight.float().T).to(torch.bfloat16).float() for value, weight in each]
        stream = self.residual + torch.stack(sums).sum(dim=0).to(torch.bfloat16)
        norm = RMSNorm(HIDDEN, EPS).to(torch.bfloat16)
        norm.weight.data = self.gamma
        return stream, norm(stream).float() @ self.behind.float().T


def drawn(generator: torch.Generator, tokens: int, inner: int, columns: int) -> Drawn:
    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    residual, values = draw(tokens, HIDDEN), draw(tokens, inner)
    behind, out = draw(columns, HIDDEN, scale=HIDDEN**-0.5), draw(HIDDEN, inner, scale=inner**-0.5)
    return Drawn(residual, values, out, 1 + 0.1 * draw(HIDDEN), behind)


def factor(stream: Tensor) -> Tensor:
    return torch.rsqrt(stream.float().square().mean(dim=1, keepdim=True) + EPS)


def test_choices_are_closer_to_exact_than_those_by_rounded_hidden_states() -> None:
    """Experts chosen by folded weights, and as the ordinary BF16 graph does."""
    generator = torch.Generator().manual_seed(1)
    sample = drawn(generator, 512, 8 * 128, 384)
    bias = torch.randn(384, generator=generator) * 0.1
    wanted, (stream, rounded) = sample.exact(), sample.ordinary(8)
    of_residual, of_heads = early_router.fold(sample.behind, sample.gamma, {"weight": sample.out}, format_of(None, ""))
    early = (sample.residual.float() @ of_residual + sample.inner.float() @ of_heads) * factor(stream)

    def error(logits: Tensor) -> tuple[float, int]:
        sets = [noaux_tc_gate(some, bias.to(some.dtype), 8)[0].sort(dim=1).values for some in (logits, wanted)]
        return float((logits - wanted).norm() / wanted.norm()), int((sets[0] != sets[1]).any(dim=1).sum())

    (far, changed), (near, kept) = error(rounded), error(early)
    print(f"\nrelative L2 {far:.1e}, {changed} of 512 tokens with other experts; folded {near:.1e}, {kept}")
    assert near < far / 10
    assert kept < changed


def test_down_projections_are_closer_to_exact_than_those_of_rounded_hidden_states() -> None:
    """64 ranks with 32 columns of two experts."""
    ranks = 64
    sample = drawn(torch.Generator().manual_seed(1), 64, ranks * 2 * 32, 2112)
    wanted, (stream, rounded) = sample.exact(), sample.ordinary(ranks)
    names = {
        "q_a_proj": sample.behind[:1536],
        "kv_a_proj_with_mqa": sample.behind[1536:],
        "input_layernorm": sample.gamma,
    }
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905").model_copy(update={"quantization": None})
    scaled = early_qkv_a.scaled_projections(config, 1, lambda module: {"weight": names[module.rpartition(".")[2]]})
    of_inner = early_qkv_a.fold(scaled, sample.out.float(), torch.bfloat16)
    of_residual = scaled.T.to(torch.bfloat16)
    # Summands of each rank in float32, and in BF16 as they would ride in a BF16 all-reduce.
    cuts = (sample.residual.chunk(ranks, dim=1), of_residual.chunk(ranks), sample.inner.chunk(ranks, dim=1))
    each = zip(*cuts, of_inner.chunk(ranks), strict=True)
    summands = torch.stack([h.float() @ a.float() + v.float() @ w.float() for h, a, v, w in each])
    early = (summands.sum(dim=0) * factor(stream)).to(torch.bfloat16)
    in_bf16 = (summands.to(torch.bfloat16).float().sum(dim=0).to(torch.bfloat16) * factor(stream)).to(torch.bfloat16)
    results = (rounded.to(torch.bfloat16), early, in_bf16)
    far, near, third = (float((some - wanted).norm() / wanted.norm()) for some in results)
    print(f"\nrelative L2 to float64: ordinary {far:.1e}, folded {near:.1e}, its summands in BF16 {third:.1e}")
    assert near < 0.75 * far
