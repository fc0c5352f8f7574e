"""The whole-layer kernel at the widths of one rank of 64, alone: its own summands against float64, by the same formula.

What other ranks would add is left out, so the all-reduces give back what the rank brought.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import nki
import nki.isa as nisa
import nki.language as nl
import pytest
import torch
from e4m3 import to_kernel
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.nki import step_sizes
from kimi_k2.nki.kernels.layers import decode_layers, layer_of
from kimi_k2.nki.kernels.linear import load_weight, project
from kimi_k2.nki.step_sizes import BF16, F32
from kimi_k2.ops.experts import noaux_tc_gate
from nki_emulator.settings import settings

from .relative_error import relative

CONFIG = KimiK2Config.from_preset("kimi-k2-instruct-0905")
HELD, BLOCKS, OWN = 10, 56, 112  # experts of the rank, blocks of the hidden state, columns of the residual
Q_RANK, RANK, ROPE, NOPE = CONFIG.q_lora_rank, CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim, CONFIG.qk_nope_head_dim
SCALE, SCALING, EPS = 0.1447, 2.827, 1e-6
Layer = dict[str, Tensor]
WHOLE = [(F32, False, 32, 4096, 1e-5)] if os.environ.get("KIMI_K2_SLOW") else []


def layer(generator: torch.Generator, dtype: torch.dtype, slots: int, last: bool, plain: bool, width: int) -> Layer:
    """A rank's layer in `dtype`, experts in FP8 beside BF16; if `plain`, the shared one in `dtype` without scales."""
    sizes = step_sizes.layer(CONFIG, width, HELD, slots)
    made = step_sizes.drawn(sizes, generator)
    # The rank holds all that are chosen, or of 64 columns five.
    made["bias"][:, : HELD if width == 32 else 5] += 2.0
    made["bias"][:, 200:203] += 0.0 if width == 32 else 2.0
    if plain:
        made |= {name: made[name].to(dtype) / 1300 for name in ("shared_gate_up", "shared_down")}
        made = {name: tensor for name, tensor in made.items() if not name.startswith("shared") or "scales" not in name}
    if dtype == F32:
        made = {name: tensor.float() for name, tensor in made.items()}
    return {name: tensor for name, tensor in made.items() if not (last and name.startswith("next_"))}


def rms(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape, eps=EPS)


def expert(x: Tensor, of: SimpleNamespace, kind: str = "", number: Any = ...) -> tuple[Tensor, Tensor]:
    """(what goes into down, the result) of tiles [128, H/128, 2 I] and [I, H] with their scales."""
    gate_up, down = (getattr(of, f"{kind}{name}")[number] for name in ("gate_up", "down"))
    products = torch.einsum("cp,pcj->jc", x.view(BLOCKS, 128), gate_up)
    if hasattr(of, f"{kind}gate_up_scales"):
        scales = getattr(of, f"{kind}gate_up_scales")[number]
        products *= scales.repeat_interleave(len(products) // 2, dim=0)
        down = down * getattr(of, f"{kind}down_scales")[number].repeat_interleave(128)
    gate, up = products.sum(1).chunk(2)
    inner = torch.nn.functional.silu(gate) * up
    return inner, inner @ down


def reference(x: Tensor, downs: Tensor, layers: list[Layer], cos: Tensor, sin: Tensor, slots: int) -> Tensor:
    """The residual behind the layers, float64."""
    for tensors in layers:
        one = SimpleNamespace(**{name: tensor.double() for name, tensor in tensors.items()})
        scale = torch.rsqrt(x.square().mean() + EPS)
        q_a, latent, key = (downs * scale).split([Q_RANK, RANK, ROPE])
        q = torch.einsum("cp,pcj->j", (rms(q_a) * one.q_norm).view(-1, 128), one.q_b)

        def rotated(values: Tensor) -> Tensor:
            return values * cos + values.view(-1, 2).flip(1).flatten() * sin

        query = torch.cat((q[:NOPE] @ one.w_uk[0, :, 0], rotated(q[NOPE:])))
        cached = torch.cat((one.latents[0, :slots], (rms(latent) * one.kv_norm)[None]))
        keys = torch.cat((one.keys[0, :slots], rotated(key)[None]))
        weights = (torch.cat((cached, keys), 1) @ query * SCALE).softmax(0)
        value = torch.einsum("cp,pcv->v", (weights @ cached).view(-1, 128), one.w_uv[0])
        sums = x[:OWN] @ one.early_residual + value @ one.early_heads
        x = x + value @ one.o_proj[:, 0]
        normed = rms(x)
        logits = sums * torch.rsqrt(x.square().mean() + EPS)
        index, share = noaux_tc_gate(logits[None], one.bias[0], 8, routed_scaling_factor=SCALING)
        normed = normed * one.norm
        inner, total = expert(normed, one, "shared_")
        following, moved = hasattr(one, "next_residual"), torch.zeros_like(downs)
        if following:
            moved = x[:OWN] @ one.next_residual + inner @ one.next_shared
        for number, weight in zip(index[0].tolist(), share[0], strict=True):
            if number >= HELD:
                continue
            inner, out = expert(normed, one, number=number)
            total = total + weight * out
            if following:
                moved = moved + weight * inner @ one.next_experts[number]
        x, downs = x + total, moved
    return x


@pytest.mark.parametrize(
    ("dtype", "plain", "width", "slots", "bound"),
    [
        (F32, False, 64, 256, 1e-5),  # others elsewhere, halves on the cores
        (BF16, False, 32, 4096, 1e-2),
        (BF16, True, 64, 4096, 1e-2),  # as INT4 members store their shared expert
        *WHOLE,
    ],
)
def test_two_layers_of_one_rank(dtype: torch.dtype, plain: bool, width: int, slots: int, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [layer(generator, dtype, slots, last, plain, width) for last in (False, True)]
    hidden, downs = (torch.randn(1, size, generator=generator) for size in (CONFIG.hidden_size, CONFIG.qkv_a_dim))
    angles = torch.rand(ROPE // 2, generator=generator).double() * 6.28
    cos, sin = angles.cos().repeat_interleave(2), angles.sin().repeat_interleave(2)
    sin[0::2] *= -1
    used, experts = slots - 3, CONFIG.n_routed_experts
    lengths = torch.full((1, 1), used, dtype=torch.int32)
    given = tuple(layer_of({name: to_kernel(tensor) for name, tensor in tensors.items()}) for tensors in layers)
    with mock.patch.object(settings, "spills_allowed", dtype == F32):  # which no deployment has, and SBUF not for all
        out, _, _ = decode_layers[2](
            hidden, downs, given, torch.stack((cos, sin))[:, :, None].float(), lengths, 64, ((0,),), 0,
            HELD if width == 32 else experts, SCALE, SCALING, EPS,
        )  # fmt: skip
    wanted = reference(hidden[0].double(), downs[0].double(), layers, cos, sin, used)
    assert relative(out, wanted) < bound


def test_a_projection_of_more_than_a_bank_of_sums() -> None:
    """Tokens and output rows in groups: 640 rows, 3 chunks of inputs, 40 and 200 tokens, each chunk with its scales."""

    @nki.jit
    def kernel(columns: Any, weight: Any, scales: Any) -> Any:
        out = nl.ndarray((128, 5, columns.shape[2]), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(out, project(load_weight(columns), load_weight(weight), load_weight(scales), nl.float32))
        return out

    generator = torch.Generator().manual_seed(0)
    weight, scales = torch.randn(128, 3, 640, generator=generator), torch.rand(128, 5, 3, generator=generator)
    for tokens in (40, 200):
        columns = torch.randn(128, 3, tokens, generator=generator)
        by_row = weight.double().view(128, 3, 5, 128)
        wanted = torch.einsum("pkt,pknj,jnk->jnt", columns.double(), by_row, scales.double())
        assert relative(kernel(columns, weight, scales), wanted) < 1e-5
