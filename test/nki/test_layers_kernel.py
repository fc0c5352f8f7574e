"""Whole layers in one kernel, collectives inside, on all ranks of a small model; float64 without folded weights."""

from __future__ import annotations

import os
from collections import namedtuple
from functools import cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from kimi_k2.nki.kernels.layer_attention import FIELDS
from kimi_k2.nki.kernels.layers import decode_layers
from kimi_k2.ops.embedding import apply_rotary_interleaved
from kimi_k2.ops.experts import noaux_tc_gate
from nki_emulator.ranks import run_on_ranks

from .relative_error import relative

RANKS, HEADS, HIDDEN, EXPERTS, WIDTH, LAYERS = 4, 4, 512, 128, 32, 2
Q_RANK, RANK, ROPE, NOPE, VALUE = 256, 128, 64, 128, 128
SLOTS, SCALE, SCALING, EPS, LATENT_EPS = 512, 0.1447, 2.827, 1e-6, 1e-3
BEHIND = 128  # slots of a cache that a step does not read
BLOCKS, DOWNS = HIDDEN // 128, Q_RANK + RANK + ROPE
Layer: Any = namedtuple("Layer", FIELDS)  # type: ignore[misc]


def rms(x: Tensor, weight: Tensor | float = 1.0, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


class Weights:
    """One layer of all ranks, float64; block scales of experts are drawn, a rank's rows lie in one block."""

    def __init__(self, generator: torch.Generator) -> None:
        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * scale).float().double()

        self.input_norm, self.q_norm = 1 + 0.1 * normal(HIDDEN), 1 + 0.1 * normal(Q_RANK)
        self.kv_norm, self.norm = 1 + 0.1 * normal(RANK), 1 + 0.1 * normal(HIDDEN)
        self.downs = normal(DOWNS, HIDDEN, scale=HIDDEN**-0.5)
        self.q_b = normal(HEADS, NOPE + ROPE, Q_RANK, scale=Q_RANK**-0.5)
        self.uk, self.uv = (normal(HEADS, NOPE, RANK, scale=0.1) for _ in range(2))
        self.o = normal(HIDDEN, HEADS * VALUE, scale=0.05)
        self.gate, self.bias = normal(EXPERTS, HIDDEN, scale=0.05), normal(EXPERTS, scale=0.1)
        inner = RANKS * WIDTH
        self.up, self.down = normal(EXPERTS, 2, inner, HIDDEN, scale=0.05), normal(EXPERTS, HIDDEN, inner, scale=0.05)
        self.shared_up, self.shared_down = normal(1, 2, inner, HIDDEN, scale=0.05), normal(1, HIDDEN, inner, scale=0.05)
        self.up_scales, self.down_scales = (1 + torch.rand(EXPERTS, n, BLOCKS, generator=generator) for n in (2, 1))

    @cached_property
    def scaled(self) -> tuple[Tensor, Tensor]:
        """gate and up [E, 2, I, H], down [E, H, I] with their scales."""
        ups = self.up_scales.double().repeat_interleave(128, 2)[:, :, None]
        downs = self.down_scales[:, 0].double().repeat_interleave(128, 1)[:, :, None]
        return self.up * ups, self.down * downs


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    gate, value = x @ up[0].T, x @ up[1].T
    return (torch.nn.functional.silu(gate) * value) @ down.T


class Model:
    """Layers, caches and one token for each of B sequences."""

    def __init__(self, batch: int) -> None:
        generator = torch.Generator().manual_seed(batch)
        self.batch, self.layers = batch, [Weights(generator) for _ in range(LAYERS)]
        self.hidden = torch.randn(batch, HIDDEN, generator=generator).double()
        self.latents = torch.randn(LAYERS, batch, SLOTS, RANK, generator=generator)
        self.keys = torch.randn(LAYERS, batch, SLOTS, ROPE, generator=generator)
        self.lengths = torch.randint(1, SLOTS, (batch, 1), generator=generator, dtype=torch.int32)
        self.lengths[-1] = SLOTS - 3  # slots of both cores
        angles = torch.rand(batch, ROPE // 2, generator=generator).double() * 6.28
        self.cos, self.sin = angles.cos(), angles.sin()

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden, new latents, new keys) in float64."""
        x, latents, keys = self.hidden, [], []
        for number, w in enumerate(self.layers):
            q_a, latent, key = (rms(x, w.input_norm) @ w.downs.T).split([Q_RANK, RANK, ROPE], -1)
            q = torch.einsum("bc,hnc->bhn", rms(q_a, w.q_norm, LATENT_EPS), w.q_b)
            rope = apply_rotary_interleaved(q[..., NOPE:], self.cos[:, None], self.sin[:, None])
            query = torch.cat((torch.einsum("bhn,hnr->bhr", q[..., :NOPE], w.uk), rope), -1)
            latents.append(rms(latent, w.kv_norm, LATENT_EPS))
            keys.append(apply_rotary_interleaved(key, self.cos, self.sin))
            values = torch.cat((self.latents[number].double(), latents[-1][:, None]), 1)
            cached = torch.cat((values, torch.cat((self.keys[number].double(), keys[-1][:, None]), 1)), 2)
            unused = torch.arange(SLOTS + 1)[None] >= self.lengths
            unused[:, SLOTS] = False
            scores = torch.einsum("bhd,bsd->bhs", query, cached) * SCALE
            weights = scores.masked_fill(unused[:, None], float("-inf")).softmax(-1)
            x = x + torch.einsum("bhr,hvr->bhv", weights @ values, w.uv).flatten(1) @ w.o.T
            normed = rms(x, w.norm)
            index, share = noaux_tc_gate(normed @ w.gate.T, w.bias, 8, routed_scaling_factor=SCALING)
            up, down = w.scaled
            routed = [
                sum((share[b, n] * mlp(normed[b], up[e], down[e]) for n, e in enumerate(row)), torch.zeros(HIDDEN))
                for b, row in enumerate(index.tolist())
            ]
            x = x + torch.stack(routed) + mlp(normed, w.shared_up[0], w.shared_down[0])
        return x, torch.stack(latents), torch.stack(keys)

    def arguments(self, rank: int, dtype: Any, shared: int = 1, cores: int = 2) -> list[Any]:
        """Of `decode_layers` on one rank; `shared` neighbours share a cache."""
        first = self.layers[0]
        projected = self.hidden @ (first.downs * first.input_norm).T
        rotation = torch.stack((self.cos, self.sin)).repeat_interleave(2, -1)
        rotation[1, :, 0::2] *= -1
        layers, lengths, more = [self.layer(number, rank, dtype) for number in range(LAYERS)], self.lengths, []
        if shared > 1:
            place, each = rank % shared, SLOTS // shared
            group = range(rank - place, rank - place + shared)
            layers = [self.shared(one, number, group, place, dtype, cores) for number, one in enumerate(layers)]
            lengths = (lengths - place * each).clamp(0, each)
            groups = tuple(tuple(range(first, first + shared)) for first in range(0, RANKS, shared))
            more = [groups, torch.full((self.batch, 1), int(place == 1), dtype=torch.int32)]
        return [
            self.hidden.float(), projected.float(), tuple(map(tuple, layers)),
            rotation.float().transpose(1, 2).contiguous(), lengths, RANKS, (tuple(range(RANKS)),),
            torch.zeros(1, 1, dtype=torch.int32), EXPERTS, SCALE, SCALING, EPS,
            *(more or (None, None)), LATENT_EPS, SLOTS // shared,
        ]  # fmt: skip

    def shared(self, layer: Any, number: int, group: range, place: int, dtype: Any, cores: int) -> Any:
        """A layer whose cache a group of ranks shares: weights of all their heads' queries, a part of the slots."""
        w, each = self.layers[number], len(group) // cores
        halves = [w.q_b[group.start + core * each : group.start + (core + 1) * each] for core in range(cores)]
        q_b = torch.stack([torch.cat((q[:, :NOPE].flatten(0, 1), q[:, NOPE:].flatten(0, 1))) for q in halves])
        uk = w.uk[group.start : group.stop].view(cores, each, NOPE, 1, RANK)
        slots = slice(place * SLOTS // len(group), (place + 1) * SLOTS // len(group))
        tiles = q_b.view(cores, -1, Q_RANK // 128, 128).permute(0, 3, 2, 1)
        return layer._replace(
            q_b=np.ascontiguousarray(tiles.float().numpy()).astype(dtype), w_uk=uk.float().numpy().astype(dtype),
            latents=np.ascontiguousarray(self.latents[number][:, slots].numpy()).astype(dtype),
            keys=np.ascontiguousarray(self.keys[number][:, slots].numpy()).astype(dtype),
        )  # fmt: skip

    def layer(self, number: int, rank: int, dtype: Any) -> Any:
        """A rank's weights of one layer, BF16 or float32, folded ones as conversion folds them."""
        w, each, own = self.layers[number], HEADS // RANKS, HIDDEN // RANKS

        def cast(values: Tensor) -> Any:
            return np.ascontiguousarray(values.float().numpy()).astype(dtype)

        heads = slice(rank * each, (rank + 1) * each)
        values, rows = slice(rank * each * VALUE, (rank + 1) * each * VALUE), slice(rank * own, (rank + 1) * own)
        mine = slice(rank * WIDTH, (rank + 1) * WIDTH)
        q_b = torch.cat((w.q_b[heads, :NOPE].flatten(0, 1), w.q_b[heads, NOPE:].flatten(0, 1)))
        early = (w.gate * w.norm).T
        _, down = w.scaled
        after: tuple[Any, ...] = (None, None, None)
        if number + 1 < LAYERS:
            folded = self.layers[number + 1].downs * self.layers[number + 1].input_norm
            experts = (down[:, :, mine].float().transpose(1, 2) @ folded.float().T).double()
            shared = w.shared_down[0][:, mine].T @ folded.T
            after = cast(folded.T[rows]), cast(experts), cast(shared)
        tiles = [
            cast(part[:, :, mine].reshape(-1, 2 * WIDTH, BLOCKS, 128).permute(0, 3, 2, 1))
            for part in (w.up, w.shared_up)
        ]
        behind = (0, 0, 0, BEHIND)
        caches = [cast(torch.nn.functional.pad(one[number], behind, value=1e4)) for one in (self.latents, self.keys)]
        made: Any = Layer
        return made(
            cast(w.q_norm), cast(w.kv_norm), cast(q_b.view(-1, Q_RANK // 128, 128).permute(2, 1, 0)), None,
            cast(w.uk[heads, :, None]), None,
            cast(w.uv[heads].view(each, VALUE, RANK // 128, 128).permute(0, 3, 2, 1)), None,
            cast(w.o[:, values].view(HIDDEN, each, VALUE).permute(2, 1, 0)), None,
            early[rows].float(), (w.o.T @ early)[values].float(),
            caches[0], caches[1],
            cast(w.norm), w.bias.float()[None],
            tiles[0], w.up_scales.numpy(), cast(w.down[:, :, mine].transpose(1, 2)), w.down_scales[:, 0].numpy(),
            tiles[1][0], None, cast(w.shared_down[0][:, mine].T), None, *after,
        )  # fmt: skip


def run(model: Model, cores: int, dtype: Any, shared: int = 1) -> list[list[Tensor]]:
    """(hidden, new latents, new keys) of each rank."""
    arguments = [model.arguments(rank, dtype, shared, cores) for rank in range(RANKS)]
    found = run_on_ranks(decode_layers[cores], arguments)
    return [[torch.from_numpy(np.asarray(part, np.float32)).double() for part in one] for one in found]


@lru_cache(maxsize=1)  # about a gigabyte
def model_of(batch: int) -> Model:
    return Model(batch)


MORE = [(3, 2, 1), (2, 1, 1), (1, 2, 2), (3, 2, 2)] if os.environ.get("KIMI_K2_SLOW") else []


@pytest.mark.parametrize(("batch", "cores", "shared"), [(1, 2, 1), (2, 2, 1), (2, 2, 2), (2, 1, 4), *MORE])
def test_layers_in_float32(batch: int, cores: int, shared: int) -> None:
    model = model_of(batch)
    wanted = model.reference()
    found = run(model, cores, np.float32, shared)
    for rank in found:
        for got, exact in zip(rank, wanted, strict=True):
            assert relative(got, exact) < 1e-5
        assert torch.equal(rank[0], found[0][0])  # the residual is the same on all ranks, bit for bit


def test_layers_in_bfloat16() -> None:
    model = model_of(1)
    wanted = model.reference()
    for rank in run(model, 2, ml_dtypes.bfloat16):
        for got, exact in zip(rank, wanted, strict=True):
            assert relative(got, exact) < 2e-2
