"""The attention kernels at the sizes of one rank against float64: BF16 and FP8 weights, LNC 1 and 2."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest
import torch
from torch import Tensor

from kimi_k2.nki.kernels.attention import attention_decode
from kimi_k2.nki.kernels.linear import load_weight, project
from kimi_k2.ops.embedding import apply_rotary_interleaved

from .relative_error import relative

HIDDEN, Q_RANK, RANK, ROPE, NOPE, VALUE = 7168, 1536, 512, 64, 128, 128
SCALE, EPS = 0.1447, 1e-6
SLOW = bool(os.environ.get("KIMI_K2_SLOW"))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """As `kimi_k2.model.linear.RMSNorm`: in float32 at least, rounded to the input's dtype before the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


class Weight:
    """A weight [out, in], plain or FP8 with a scale a block of 128 x 128 of the whole matrix that it was cut from.

    Args:
        first_row: where in its blocks the first row lies.
    """

    def __init__(
        self, rows: int, columns: int, dtype: torch.dtype, generator: torch.Generator, first_row: int = 0
    ) -> None:
        drawn = torch.randn(rows, columns, generator=generator) / columns**0.5
        self.scales: Tensor | None = None
        if dtype is torch.float8_e4m3fn:
            self.stored = (drawn * 40 * columns**0.5).clamp(-240, 240).to(dtype)
            blocks = torch.rand(-(-(rows + first_row) // 128), -(-columns // 128), generator=generator) + 0.5
            self.scales = blocks.repeat_interleave(128, 0)[first_row : first_row + rows] / (40 * columns**0.5)
            self.values = self.stored.double() * self.scales.repeat_interleave(128, 1)[:, :columns].double()
        else:
            self.stored = drawn.to(dtype)
            self.values = self.stored.double()

    def to(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)

    def tiles(self) -> Any:
        """[128, in/128, out]: [p, c, j] is row j, column c * 128 + p."""
        rows, columns = self.stored.shape
        return array(self.stored.view(rows, columns // 128, 128).permute(2, 1, 0))

    def scale_tiles(self) -> Any:
        """[rows, row groups, chunks]."""
        if self.scales is None:
            return None
        rows = min(len(self.scales), 128)
        return self.scales.float().view(-1, rows, self.scales.shape[1]).permute(1, 0, 2).contiguous().numpy()


def array(values: Tensor) -> Any:
    if values.dtype is torch.float8_e4m3fn:  # within 240 both formats have the same bits
        return values.contiguous().view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3)
    return values.contiguous()


def some_rows(weight: Weight, rows: Tensor) -> Weight:
    part = object.__new__(Weight)
    part.stored, part.values = weight.stored[rows], weight.values[rows]
    part.scales = None if weight.scales is None else weight.scales[rows]
    return part


@dataclass
class Rank:
    """One rank's attention weights and B sequences."""

    batch: int
    slots: int
    heads: int
    dtype: torch.dtype
    stored: torch.dtype

    def __post_init__(self) -> None:
        self.generator = generator = torch.Generator().manual_seed(self.batch + self.heads)
        dtype, heads, stored = self.dtype, self.heads, self.stored

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        self.projected = normal(self.batch, Q_RANK + RANK + ROPE)
        self.q_norm, self.kv_norm = 1 + 0.1 * normal(Q_RANK), 1 + 0.1 * normal(RANK)
        # An odd first head's rows begin in the middle of a block.
        self.q_b = Weight(heads * (NOPE + ROPE), Q_RANK, stored, generator, first_row=64)
        self.kv_b = Weight(heads * (NOPE + VALUE), RANK, stored, generator)
        self.o = Weight(HIDDEN, heads * VALUE, stored, generator)
        self.latents, self.keys = normal(self.batch, self.slots, RANK), normal(self.batch, self.slots, ROPE)
        self.lengths = torch.randint(0, self.slots, (self.batch, 1), generator=generator, dtype=torch.int32)
        angles = torch.rand(self.batch, ROPE // 2, generator=generator, dtype=torch.float64) * 6.28
        self.cos, self.sin = angles.cos(), angles.sin()

    def arguments(self) -> list[Any]:
        heads = torch.arange(self.heads)[:, None]
        nope = (heads * (NOPE + ROPE) + torch.arange(NOPE)).flatten()
        rope = (heads * (NOPE + ROPE) + NOPE + torch.arange(ROPE)).flatten()
        q_parts = [some_rows(self.q_b, rows) for rows in (nope, rope)]
        q_tiles = np.concatenate([np.asarray(_plain(part.tiles())) for part in q_parts], 2)
        q_scales = None
        if self.q_b.scales is not None:
            rotary = q_parts[1].scales
            assert rotary is not None
            padded = torch.zeros(-(-len(rotary) // 128) * 128, rotary.shape[1])
            padded[: len(rotary)] = rotary
            rows = torch.cat((q_parts[0].scales, padded)).float()  # type: ignore[arg-type]
            q_scales = rows.view(-1, 128, rows.shape[1]).permute(1, 0, 2).contiguous().numpy()
        kv = [h * (NOPE + VALUE) for h in range(self.heads)]
        uk = [some_rows(self.kv_b, torch.arange(h, h + NOPE)) for h in kv]
        uv = [some_rows(self.kv_b, torch.arange(h + NOPE, h + NOPE + VALUE)) for h in kv]
        uk_tiles = array(torch.stack([part.stored for part in uk]).unsqueeze(2))
        uk_scales = uv_scales = None
        if self.kv_b.scales is not None:
            # One scale a block of columns, which are the absorbed query's rows.
            uk_scales = np.stack([np.tile(part.scales[0].numpy()[None, :, None], (128, 1, 1)) for part in uk])  # type: ignore[index]
            uv_scales = np.stack([part.scale_tiles() for part in uv])
        uv_tiles = np.stack([np.asarray(_plain(part.tiles())) for part in uv])
        rotation = torch.stack((self.cos, self.sin)).repeat_interleave(2, -1)
        rotation[1, :, 0::2] *= -1
        return [
            self.projected, self.q_norm, self.kv_norm, q_tiles, q_scales, uk_tiles, uk_scales, uv_tiles, uv_scales,
            self.o.tiles(), self.o.scale_tiles(), rotation.float().transpose(1, 2).contiguous(),
            self.latents, self.keys, self.lengths, SCALE, EPS,
        ]  # fmt: skip

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """(out, new latents, new keys), every step in `dtype`."""
        q_down, latent, key = self.projected.to(dtype).split([Q_RANK, RANK, ROPE], -1)
        q = (rms(q_down, self.q_norm.to(dtype)) @ self.q_b.to(dtype).T).view(self.batch, self.heads, NOPE + ROPE)
        cos, sin = self.cos.to(dtype), self.sin.to(dtype)
        q_rope = apply_rotary_interleaved(q[..., NOPE:], cos[:, None], sin[:, None])
        key, latent = apply_rotary_interleaved(key, cos, sin), rms(latent, self.kv_norm.to(dtype))
        kv_b = self.kv_b.to(dtype).view(self.heads, NOPE + VALUE, RANK)
        query = torch.cat((torch.einsum("bhn,hnr->bhr", q[..., :NOPE], kv_b[:, :NOPE]), q_rope), -1)
        values = torch.cat((self.latents.to(dtype), latent[:, None]), 1)
        entries = torch.cat((values, torch.cat((self.keys.to(dtype), key[:, None]), 1)), 2)
        scores = torch.einsum("bhd,bsd->bhs", query, entries).to(torch.promote_types(dtype, torch.float32)) * SCALE
        hidden = torch.arange(self.slots + 1)[None] >= self.lengths
        hidden[:, self.slots] = False
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1).to(dtype)
        summed = torch.einsum("bhr,hvr->bhv", weights @ values, kv_b[:, NOPE:])
        return summed.flatten(1) @ self.o.to(dtype).T, latent, key


def _plain(values: Any) -> Any:
    """NumPy form of BF16 too."""
    if isinstance(values, Tensor) and values.dtype is torch.bfloat16:
        return values.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return values


def run(rank: Rank, cores: int) -> list[Tensor]:
    out, latent, key = attention_decode[cores](*rank.arguments())
    return [torch.from_numpy(np.asarray(part, np.float32)).double() for part in (out.reshape(-1, HIDDEN), latent, key)]


@pytest.mark.parametrize(("batch", "slots", "heads", "cores"), [(1, 1024, 1, 2), (4, 256, 2, 1), (3, 512, 2, 2)])
def test_attention_in_float32(batch: int, slots: int, heads: int, cores: int) -> None:
    rank = Rank(batch, slots, heads, torch.float32, torch.float32)
    for got, wanted in zip(run(rank, cores), rank.reference(torch.float64), strict=True):
        assert relative(got, wanted) < 1e-5


@pytest.mark.parametrize(("batch", "slots", "heads", "cores"), [(1, 256, 1, 2), (3, 256, 2, 1)])
def test_float32_beside_fp8_weights_is_not_rounded(batch: int, slots: int, heads: int, cores: int) -> None:
    """It is multiplied as two BF16 parts."""
    rank = Rank(batch, slots, heads, torch.float32, torch.float8_e4m3fn)
    for got, wanted in zip(run(rank, cores), rank.reference(torch.float64), strict=True):
        assert relative(got, wanted) < 1e-5


MORE = [(16, 256, 1), (64, 256, 1), (64, 256, 2), (16, 1024, 2), (1, 16384, 1)] if SLOW else []


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(("batch", "slots", "heads"), [(1, 4096, 1), (4, 256, 2), *MORE])
def test_attention_is_no_farther_than_pytorch(batch: int, slots: int, heads: int, stored: torch.dtype) -> None:
    rank = Rank(batch, slots, heads, torch.bfloat16, stored)
    wanted, plain = rank.reference(torch.float64), rank.reference(torch.bfloat16)
    for got, exact, other in zip(run(rank, 2), wanted, plain, strict=True):
        assert (got - exact).norm() <= (other.double() - exact).norm()
        assert relative(got, exact) < 1e-2


@pytest.mark.parametrize("cores", [1, 2])
def test_a_part_of_the_cache_is_read(cores: int) -> None:
    """Of 768 slots 256; what lies behind them is not a number."""
    rank = Rank(2, 768, 1, torch.float32, torch.float32)
    rank.lengths = torch.tensor([[256], [100]], dtype=torch.int32)
    wanted = rank.reference(torch.float64)
    rank.latents[:, 256:] = rank.keys[:, 256:] = float("nan")
    out, *entries = attention_decode[cores](*rank.arguments(), attended=256)
    for got, exact in zip((out, *entries), wanted, strict=True):
        assert relative(got, exact) < 1e-5


def test_a_projection_of_more_than_a_bank_of_sums() -> None:
    """Tokens and output rows in groups: 640 rows, 3 chunks of inputs, 40 and 200 tokens, each chunk with its scales."""

    @nki.jit
    def kernel(columns: Any, weight: Any, scales: Any) -> Any:
        out = nl.ndarray((128, 5, columns.shape[2]), dtype=nl.float32, buffer=nl.shared_hbm)
        result = project(load_weight(columns), load_weight(weight), load_weight(scales), nl.float32)
        nisa.dma_copy(out, result)
        return out

    generator = torch.Generator().manual_seed(0)
    weight, scales = torch.randn(128, 3, 640, generator=generator), torch.rand(128, 5, 3, generator=generator)
    for tokens in (40, 200):
        columns = torch.randn(128, 3, tokens, generator=generator)
        by_row = weight.double().view(128, 3, 5, 128)
        wanted = torch.einsum("pkt,pknj,jnk->jnt", columns.double(), by_row, scales.double())
        assert relative(kernel(columns, weight, scales), wanted) < 1e-5
