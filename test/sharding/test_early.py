"""Weights folded ahead of a layer: closer to exact, at the real width, than what the ordinary BF16 graph computes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kimi_k2.config import KimiK2Config
from kimi_k2.model.linear import RMSNorm
from kimi_k2.ops.experts import noaux_tc_gate
from kimi_k2.quantization.stored import format_of
from kimi_k2.sharding import early_qkv_a, early_router


def test_choices_are_closer_to_exact_than_those_by_rounded_hidden_states() -> None:
    """At the real width, BF16 activations: experts chosen by folded weights, and as the ordinary BF16 graph does."""
    tokens, hidden, count, ranks, width, eps = 512, 7168, 384, 8, 128, 1e-6
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    residual, values = draw(tokens, hidden), draw(tokens, ranks * width)
    gate, o_proj = draw(count, hidden, scale=hidden**-0.5), draw(hidden, ranks * width, scale=(ranks * width) ** -0.5)
    gamma, bias = 1 + 0.1 * draw(hidden), torch.randn(count, generator=generator) * 0.1

    def error(logits: Tensor, wanted: Tensor) -> tuple[float, int]:
        sets = [noaux_tc_gate(one, bias.to(one.dtype), 8)[0].sort(dim=1).values for one in (logits, wanted)]
        return float((logits - wanted).norm() / wanted.norm()), int((sets[0] != sets[1]).any(dim=1).sum())

    x = residual.double() + values.double() @ o_proj.double().T
    wanted = F.rms_norm(x, (hidden,), gamma.double(), eps) @ gate.double().T

    # Each rank's part of o_proj and their sum are BF16, as are the residual stream and what the norm gives.
    parts = zip(values.chunk(ranks, dim=1), o_proj.chunk(ranks, dim=1), strict=True)
    rounded_parts = [(value.float() @ weight.float().T).to(torch.bfloat16).float() for value, weight in parts]
    summed = torch.stack(rounded_parts).sum(dim=0)
    stream = residual + summed.to(torch.bfloat16)
    norm = RMSNorm(hidden, eps).to(torch.bfloat16)
    norm.weight.data = gamma
    rounded = norm(stream).float() @ gate.float().T

    stored = {"weight": o_proj}
    of_residual, of_heads = early_router.fold(gate, gamma, stored, format_of(None, ""))
    early = residual.float() @ of_residual + values.float() @ of_heads
    early = early * torch.rsqrt(stream.float().square().mean(dim=1, keepdim=True) + eps)

    (far, changed), (near, kept) = (error(logits, wanted) for logits in (rounded, early))
    print(f"\nrelative L2 {far:.1e}, {changed} of {tokens} tokens with other experts; folded {near:.1e}, {kept}")
    assert near < far / 10
    assert kept < changed


def test_down_projections_are_closer_to_exact_than_those_of_rounded_hidden_states() -> None:
    """At the real width, 64 ranks with 32 columns of two experts; BF16 weights, activations and residual."""
    tokens, hidden, columns, ranks, width, eps = 64, 7168, 2112, 64, 2 * 32, 1e-6
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    residual, inner = draw(tokens, hidden), draw(tokens, ranks * width)
    w_a, down = draw(columns, hidden, scale=hidden**-0.5), draw(hidden, ranks * width, scale=(ranks * width) ** -0.5)
    gamma = 1 + 0.1 * draw(hidden)
    x = residual.double() + inner.double() @ down.double().T
    wanted = F.rms_norm(x, (hidden,), gamma.double(), eps) @ w_a.double().T

    # Each rank's part of the experts' output and their sum are BF16, as are the residual stream and the norm's output.
    each = zip(inner.chunk(ranks, dim=1), down.chunk(ranks, dim=1), strict=True)
    parts = torch.stack([(value.float() @ weight.float().T).to(torch.bfloat16).float() for value, weight in each])
    stream = residual + parts.sum(dim=0).to(torch.bfloat16)
    normed = F.rms_norm(stream.float(), (hidden,), None, eps).to(torch.bfloat16) * gamma
    rounded = (normed.float() @ w_a.float().T).to(torch.bfloat16)

    names = {"q_a_proj": w_a[:1536], "kv_a_proj_with_mqa": w_a[1536:], "input_layernorm": gamma}
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905").model_copy(update={"quantization": None})
    scaled = early_qkv_a.scaled_projections(config, 1, lambda module: {"weight": names[module.rpartition(".")[2]]})
    of_inner = early_qkv_a.fold(scaled, down.float(), torch.bfloat16)
    of_residual = scaled.T.to(torch.bfloat16)
    # Summands of each rank in float32, and in BF16 as they would ride in a BF16 all-reduce.
    summands = torch.stack([
        h.float() @ a.float() + v.float() @ w.float()
        for h, a, v, w in zip(
            residual.chunk(ranks, dim=1), of_residual.chunk(ranks), inner.chunk(ranks, dim=1), of_inner.chunk(ranks),
            strict=True,
        )
    ])  # fmt: skip
    factor = torch.rsqrt(stream.float().square().mean(dim=1, keepdim=True) + eps)
    early = (summands.sum(dim=0) * factor).to(torch.bfloat16)
    in_bf16 = (summands.to(torch.bfloat16).float().sum(dim=0).to(torch.bfloat16) * factor).to(torch.bfloat16)

    far, near, third = (float((one - wanted).norm() / wanted.norm()) for one in (rounded, early, in_bf16))
    print(f"\nrelative L2 to float64: ordinary {far:.1e}, folded {near:.1e}, its summands in BF16 {third:.1e}")
    assert near < 0.75 * far
