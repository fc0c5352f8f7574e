"""The whole-layer kernel at the widths of one rank of 64, alone: its own summands against float64, by the same formula.

What other ranks would add is left out, so the all-reduces give back what the rank brought.
"""

from __future__ import annotations

import os
from collections import namedtuple
from typing import Any

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch
from torch import Tensor

from kimi_k2.nki.kernels.layer_attention import FIELDS
from kimi_k2.nki.kernels.layers import decode_layers
from kimi_k2.nki.kernels.linear import load_weight, project
from kimi_k2.ops.experts import noaux_tc_gate

from .relative_error import relative

HIDDEN, EXPERTS, HELD, BLOCKS, OWN = 7168, 384, 10, 56, 112
Q_RANK, RANK, ROPE, NOPE, VALUE, DOWNS = 1536, 512, 64, 128, 128, 2112
SCALE, SCALING, EPS = 0.1447, 2.827, 1e-6
Layer: Any = namedtuple("Layer", FIELDS)  # type: ignore[misc]
WHOLE = [(np.float32, np.float32, False, 32, 4096, 1e-5)] if os.environ.get("KIMI_K2_SLOW") else []


def drawn(generator: torch.Generator, dtype: Any, *shape: int, scale: float = 1.0) -> Any:
    return (torch.randn(*shape, generator=generator) * scale).numpy().astype(dtype)


def layer(generator: torch.Generator, dtype: Any, stored: Any, slots: int, last: bool, plain: bool, width: int) -> Any:
    """A rank's weights of one layer, experts as `stored`; if `plain`, the shared one in `dtype` without scales."""

    def normal(*shape: int, scale: float = 1.0) -> Any:
        return drawn(generator, dtype, *shape, scale=scale)

    def tiles(*shape: int) -> Any:
        return np.clip(drawn(generator, np.float32, *shape, scale=40.0), -240, 240).astype(stored)

    def scales(*shape: int) -> Any:
        return (torch.rand(*shape, generator=generator) * 4e-4 + 1e-4).numpy()

    bias = drawn(generator, np.float32, 1, EXPERTS, scale=0.1)
    # The rank holds all that are chosen, or of 64 columns five.
    bias[:, : HELD if width == 32 else 5] += 2.0
    bias[:, 200:203] += 0.0 if width == 32 else 2.0
    following = (normal(OWN, DOWNS, scale=0.02), normal(HELD, width, DOWNS, scale=0.05), normal(32, DOWNS, scale=0.05))
    shared = [tiles(128, BLOCKS, 64), scales(2, BLOCKS), tiles(32, HIDDEN), scales(BLOCKS)]
    if plain:
        shared = [normal(128, BLOCKS, 64, scale=0.03), None, normal(32, HIDDEN, scale=0.03), None]
    parts = [
        1 + normal(Q_RANK, scale=0.1), 1 + normal(RANK, scale=0.1),
        normal(128, Q_RANK // 128, NOPE + ROPE, scale=Q_RANK**-0.5), None, normal(1, NOPE, 1, RANK, scale=0.1), None,
        normal(1, 128, RANK // 128, VALUE, scale=0.05), None, normal(VALUE, 1, HIDDEN, scale=0.05), None,
        *(drawn(generator, np.float32, rows, EXPERTS, scale=0.02) for rows in (OWN, VALUE)),
        normal(1, slots, RANK), normal(1, slots, ROPE), 1 + normal(HIDDEN, scale=0.1), bias,
        tiles(HELD, 128, BLOCKS, 2 * width), scales(HELD, 2, BLOCKS), tiles(HELD, width, HIDDEN), scales(HELD, BLOCKS),
        *shared,
    ]  # fmt: skip
    return Layer(*parts, *((None,) * 3 if last else following))


def wide(values: Any) -> Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.float64))


def rms(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape, eps=EPS)


def expert(x: Tensor, gate_up: Any, up_scales: Any, down: Any, down_scales: Any) -> tuple[Tensor, Tensor]:
    """(what goes into down, the result) of tiles [128, H/128, 2 I] and [I, H] with their scales."""
    products = torch.einsum("cp,pcj->jc", x.view(BLOCKS, 128), wide(gate_up))
    if up_scales is not None:
        products *= wide(up_scales).repeat_interleave(len(products) // 2, dim=0)
    gate, up = products.sum(1).chunk(2)
    inner = torch.nn.functional.silu(gate) * up
    out = inner @ wide(down)
    return inner, out if down_scales is None else out * wide(down_scales).repeat_interleave(128)


def reference(x: Tensor, downs: Tensor, layers: list[Any], cos: Tensor, sin: Tensor, slots: int) -> Tensor:
    """The residual behind the layers, float64."""
    for one in layers:
        scale = torch.rsqrt(x.square().mean() + EPS)
        q_a, latent, key = (downs * scale).split([Q_RANK, RANK, ROPE])
        q = torch.einsum("cp,pcj->j", (rms(q_a) * wide(one.q_norm)).view(-1, 128), wide(one.q_b))

        def rotated(values: Tensor) -> Tensor:
            return values * cos + values.view(-1, 2).flip(1).flatten() * sin

        query = torch.cat((q[:NOPE] @ wide(one.w_uk)[0, :, 0], rotated(q[NOPE:])))
        cached = torch.cat((wide(one.latents)[0, :slots], (rms(latent) * wide(one.kv_norm))[None]))
        keys = torch.cat((wide(one.keys)[0, :slots], rotated(key)[None]))
        weights = (torch.cat((cached, keys), 1) @ query * SCALE).softmax(0)
        value = torch.einsum("cp,pcv->v", (weights @ cached).view(-1, 128), wide(one.w_uv)[0])
        sums = x[:OWN] @ wide(one.early_residual) + value @ wide(one.early_heads)
        x = x + value @ wide(one.o_proj)[:, 0]
        normed = rms(x)
        logits = sums * torch.rsqrt(x.square().mean() + EPS)
        index, share = noaux_tc_gate(logits[None], wide(one.bias)[0], 8, routed_scaling_factor=SCALING)
        normed = normed * wide(one.norm)
        tiles = one.shared_gate_up, one.shared_gate_up_scales, one.shared_down, one.shared_down_scales
        inner, shared = expert(normed, *tiles)
        total, moved = shared, torch.zeros(DOWNS, dtype=torch.float64)
        if one.next_residual is not None:
            moved = x[:OWN] @ wide(one.next_residual) + inner @ wide(one.next_shared)
        for number, weight in zip(index[0].tolist(), share[0], strict=True):
            if number >= HELD:
                continue
            tiles = one.gate_up[number], one.gate_up_scales[number], one.down[number], one.down_scales[number]
            inner, out = expert(normed, *tiles)
            total = total + weight * out
            if one.next_residual is not None:
                moved = moved + weight * inner @ wide(one.next_experts[number])
        x, downs = x + total, moved
    return x


@pytest.mark.parametrize(
    ("dtype", "stored", "plain", "width", "slots", "bound"),
    [
        (np.float32, ml_dtypes.float8_e4m3, False, 64, 256, 1e-5),  # others elsewhere, halves on the cores
        (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3, False, 32, 4096, 1e-2),
        (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3, True, 64, 4096, 1e-2),  # as INT4 members store their shared expert
        *WHOLE,
    ],
)
def test_two_layers_of_one_rank(dtype: Any, stored: Any, plain: bool, width: int, slots: int, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    layers = [layer(generator, dtype, stored, slots, last, plain, width) for last in (False, True)]
    hidden = drawn(generator, np.float32, 1, HIDDEN)
    downs = drawn(generator, np.float32, 1, DOWNS)
    angles = torch.rand(ROPE // 2, generator=generator).double() * 6.28
    cos, sin = angles.cos().repeat_interleave(2), angles.sin().repeat_interleave(2)
    sin[0::2] *= -1
    used = slots - 3
    lengths = torch.full((1, 1), used, dtype=torch.int32)
    out, _, _ = decode_layers[2](
        hidden, downs, tuple(map(tuple, layers)), torch.stack((cos, sin))[:, :, None].float(), lengths, 64, ((0,),), 0,
        HELD if width == 32 else EXPERTS, SCALE, SCALING, EPS,
    )  # fmt: skip
    wanted = reference(wide(hidden)[0], wide(downs)[0], layers, cos, sin, used)
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
