"""The early router's weights in converted files: against the checkpoint's own matrices in float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.model.linear import RMSNorm
from kimi_k2.ops.experts import noaux_tc_gate
from kimi_k2.quantization.fp8_block import dequantize_fp8_block
from kimi_k2.quantization.stored import format_of
from kimi_k2.sharding.early_router import fold
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import rank_file_name
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.sharding.verify import verify
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

from .test_early_qkv_a import SIZES

LAYER = 1
ROOT = f"layers.{LAYER}.early_router"
NAMES = ("residual_weight", "heads_weight")


def stored_weights(source: Path, config: KimiK2Config) -> tuple[Tensor, Tensor, Tensor]:
    """W_gate, gamma, W_o of the layer, float64."""
    root = f"model.layers.{LAYER}"
    with CheckpointReader.for_config(source, config) as reader:
        gate, gamma = reader.get(f"{root}.mlp.gate.weight"), reader.get(f"{root}.post_attention_layernorm.weight")
        o_proj = reader.get(f"{root}.self_attn.o_proj.weight")
        if o_proj.dtype.itemsize == 1:
            scale = reader.get(f"{root}.self_attn.o_proj.weight_scale_inv")
            o_proj = dequantize_fp8_block(o_proj, scale, dtype=torch.float32)
        return gate.double(), gamma.double(), o_proj.double()


@pytest.mark.parametrize(("source", "experts"), [("fp8", "tiles"), ("bf16", "bf16_tiles"), ("int4", "tiles")])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2)])
def test_ranks_sum_to_the_routers_logits(tmp_path: Path, source: str, experts: str, tp: int, ep: int) -> None:
    directory, out = tmp_path / "source", tmp_path / "out"
    config = with_format(tiny_config(num_hidden_layers=2, **SIZES), source)
    write_synthetic_checkpoint(directory, config, seed=2)
    Presharder(directory, out, Layout(tp, ep, experts=experts, decode="layers")).run()
    assert len(list(verify(out))) == tp * ep
    gate, gamma, o_proj = stored_weights(directory, config)
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(5, config.hidden_size, generator=generator, dtype=torch.float64)
    heads = torch.randn(5, config.num_attention_heads * config.v_head_dim, generator=generator, dtype=torch.float64)
    logits = torch.zeros(5, config.n_routed_experts, dtype=torch.float64)
    for rank in range(tp * ep):
        held = load_file(out / "weights" / rank_file_name(rank))
        for values, name in zip((hidden, heads), NAMES, strict=True):
            weight = held[f"{ROOT}.{name}"]
            assert weight.dtype == torch.float32
            logits += values.chunk(tp * ep, dim=1)[rank] @ weight.double()
    x = hidden + heads @ o_proj.T
    logits *= torch.rsqrt(x.square().mean(dim=1, keepdim=True) + config.rms_norm_eps)
    expected = F.rms_norm(x, (config.hidden_size,), gamma, config.rms_norm_eps) @ gate.T
    assert float((logits - expected).norm() / expected.norm()) < 1e-6


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
    of_residual, of_heads = fold(gate, gamma, stored, format_of(None, ""))
    early = residual.float() @ of_residual + values.float() @ of_heads
    early = early * torch.rsqrt(stream.float().square().mean(dim=1, keepdim=True) + eps)

    (far, changed), (near, kept) = (error(logits, wanted) for logits in (rounded, early))
    print(f"\nrelative L2 {far:.1e}, {changed} of {tokens} tokens with other experts; folded {near:.1e}, {kept}")
    assert near < far / 10
    assert kept < changed
