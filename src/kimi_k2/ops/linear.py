"""Linears over weights as they are stored, RMSNorm (Zhang & Sennrich 2019, arXiv 1910.07467), and both joined.

In batch-invariant mode on a CPU the plain functions compute with blocks of a fixed number of rows: a GEMM library
chooses its kernel, and with it the order of a sum, by the number of rows; a vectorized loop computes its last values
otherwise than the others. Blocks of one shape, padded with zeros, leave both nothing to choose. That a block's kernel
treats its rows alike is the library's affair: `test_batch_invariant.py` holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.ops.registry import COMPOSED, ELEMENTWISE, batch_invariant, operation
from kimi_k2.quantization import fp8_block
from kimi_k2.quantization.fp8_block import Fp8BlockFormat
from kimi_k2.quantization.stored import StoredFormat


@operation
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, x's dtype and shape kept.

    The statistics are taken in float32 (float64 for float64 input) and the quotient is rounded to the input's dtype
    before the weight is applied, as Hugging Face does.
    """
    if in_blocks(x):
        out: Tensor = by_rows(lambda rows: _normed(rows, weight, eps), x.reshape(-1, x.shape[-1]))
        return out.view(x.shape)
    return _normed(x, weight, eps)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


@operation(batch_invariant=COMPOSED)
def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual sum and the norm after it: x + delta and its `rms_norm`, both [T, H]."""
    total = x + delta
    return total, rms_norm(total, weight, eps)


dequantize_fp8_block = operation(fp8_block.dequantize_fp8_block, batch_invariant=ELEMENTWISE)


class Order(Protocol):
    """An order of a weight's values in memory that a kernel wants, other than the checkpoint's."""

    def restore(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """One matrix's tensors, by suffix, in the checkpoint's order again."""
        ...


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K], or one an expert [E, N, K], as it is stored.

    Attributes:
        tensors: by the checkpoint's suffix: `weight`, with `weight_scale_inv` for FP8 blocks; `weight_packed` and
            `weight_scale` for INT4 groups.
        quantization: what they are stored in; None for floats.
        order: of the values in memory; None is the checkpoint's.
    """

    tensors: dict[str, Tensor]
    quantization: StoredFormat | None = None
    order: Order | None = None

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        """(rows, columns) of a block that shares a scale, if this is an FP8 weight."""
        return self.quantization.weight_block_size if isinstance(self.quantization, Fp8BlockFormat) else None

    def expert(self, number: int) -> Weight:
        """The matrix [N, K] of one expert of [E, N, K]."""
        return replace(self, tensors={suffix: tensor[number] for suffix, tensor in self.tensors.items()})


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] in `dtype`, in the checkpoint's order."""
    tensors = weight.tensors if weight.order is None else weight.order.restore(weight.tensors)
    if weight.quantization is None:
        return tensors["weight"].to(dtype)
    if (block := weight.fp8_block) is not None:
        return dequantize_fp8_block(tensors["weight"], tensors["weight_scale_inv"], block, dtype)
    return weight.quantization.dequantize(tensors, dtype)


ROWS = 16  # of a block
SLOTS = 64  # of the cache that attention takes at a time


def in_blocks(x: Tensor) -> bool:
    """Whether functions of x go by blocks: in batch-invariant mode on a CPU. On a GPU entries of the table serve."""
    return batch_invariant() and not x.is_cuda


def by_rows(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """`function` of tensors [T, ...] whose row t gives row t of its result, or of each of its results."""
    count = len(tensors[0])
    if not in_blocks(tensors[0]) or not count:
        return function(*tensors)
    padded = [F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, -count % ROWS)) for tensor in tensors]
    made = [function(*block) for block in zip(*(tensor.split(ROWS) for tensor in padded), strict=True)]
    if isinstance(made[0], tuple):
        return tuple(torch.cat(parts)[:count] for parts in zip(*made, strict=True))
    return torch.cat(made)[:count]


def linear_rows(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times W^T for W [N, K]: [..., N]."""
    if not in_blocks(x):
        return F.linear(x, weight)
    out: Tensor = by_rows(lambda block: F.linear(block, weight), x.reshape(-1, x.shape[-1]))
    return out.view(*x.shape[:-1], len(weight))


def linear_heads(x: Tensor, weight: Tensor) -> Tensor:
    """x [B, S, H, K] times a matrix [H, K, N] a head, by blocks: [B, S, H, N]."""
    out: Tensor = by_rows(lambda block: torch.bmm(block.transpose(0, 1), weight).transpose(0, 1), x.flatten(0, 1))
    return out.view(*x.shape[:-1], weight.shape[-1])


def attend_blocks(query: Tensor, key: Tensor, value: Tensor, positions: Tensor, softmax_scale: float) -> Tensor:
    """Causal attention with an online softmax over blocks of `SLOTS`, from the first slot on.

    Slots that a query does not see add exact zeros, so that its result does not depend on how many lie behind.

    Args:
        query: [B, S, H, D].
        key: [B, G, T, D], G either H or 1 for all heads.
        value: [B, G, T, V].
        positions: int64 [B, S]; a query sees slots 0..p, padding (negative) slot 0.

    Returns:
        [B, S, H, V] in the query's dtype, computed in float32 or wider.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    padding = (0, 0, 0, -key.shape[2] % SLOTS)
    keys, values = F.pad(key.to(wide), padding), F.pad(value.to(wide), padding)

    def of_sequence(row: int) -> Tensor:
        def of_queries(block: Tensor, place: Tensor) -> Tensor:
            return _attend(block.transpose(0, 1), keys[row], values[row], place.clamp(min=0), softmax_scale)

        made: Tensor = by_rows(of_queries, query[row].to(wide), positions[row])
        return made

    return torch.stack([of_sequence(row) for row in range(len(query))]).to(query.dtype)


class Sums(NamedTuple):
    """An online softmax so far: largest score, sum of exponentials [..., 1] and weighted sum of values [..., V]."""

    top: Tensor
    total: Tensor
    summed: Tensor

    @classmethod
    def none(cls, query: Tensor, width: int) -> Sums:
        """Of queries [..., D], values of so many."""
        total = query.new_zeros(*query.shape[:-1], 1)
        return cls(torch.full_like(total, float("-inf")), total, query.new_zeros(*query.shape[:-1], width))

    def with_block(self, scores: Tensor, values: Tensor) -> Sums:
        """With further slots' scores [..., T], -inf of those that are not seen, and values [..., T, V]."""
        top = torch.maximum(self.top, scores.amax(-1, keepdim=True))
        shrink, weights = (self.top - top).exp(), (scores - top).exp()
        summed = self.summed * shrink + torch.matmul(weights.to(values.dtype), values)
        return Sums(top, self.total * shrink + weights.sum(-1, keepdim=True), summed)


def _attend(query: Tensor, key: Tensor, value: Tensor, place: Tensor, softmax_scale: float) -> Tensor:
    """Queries [H, ROWS, D] at places [ROWS] over keys [G, T, D] and values [G, T, V]: [ROWS, H, V]."""
    sums, heads = Sums.none(query, value.shape[-1]), len(query)
    for start in range(0, int(place.max()) + 1, SLOTS):
        some, slots = slice(start, start + SLOTS), torch.arange(start, start + SLOTS)
        scores = torch.bmm(query, key[:, some].mT.expand(heads, -1, -1)) * softmax_scale
        scores = scores.masked_fill(slots > place[:, None], float("-inf"))
        sums = sums.with_block(scores, value[:, some].expand(heads, -1, -1))
    return (sums.summed / sums.total).transpose(0, 1)


@operation
def dense_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times W^T for W [N, K] of the same dtype: [..., N]."""
    return linear_rows(x, weight)


@operation
def float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`dense_linear` whose sums a GPU does not round: x [..., K] times W^T for W [N, K], float32 [..., N] for BF16.

    A CPU's library has no such product: there the sums are BF16's. Wider dtypes stay as they are.
    """
    if x.dtype != torch.bfloat16:
        return linear_rows(x, weight)
    if x.is_cuda:
        return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], len(weight))
    return linear_rows(x, weight).float()


@operation
def fp8_linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> Tensor:
    """x [..., K] times W^T for an FP8 W [N, K] with one scale a block: [..., N] in x's dtype."""
    return linear_rows(x, dequantize_fp8_block(weight, weight_scale_inv, block_size, x.dtype))


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [..., K] times W^T for W [N, K] as it is stored: [..., N] in x's dtype."""
    if (block := weight.fp8_block) is not None:
        return fp8_linear(x, weight.tensors["weight"], weight.tensors["weight_scale_inv"], block)
    return dense_linear(x, dequantize(weight, x.dtype))


@operation(batch_invariant=COMPOSED)
def project(x: Tensor, weight: Weight, norm_weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """linear(rms_norm(x)) for few tokens.

    Args:
        x: [B, K].
        weight: [N, K].
        norm_weight: [K]; None leaves the norm out.
        eps: of the norm.

    Returns:
        [B, N].
    """
    return linear(x if norm_weight is None else rms_norm(x, norm_weight, eps), weight)


@operation(batch_invariant=COMPOSED)
def add_project(
    x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """linear(rms_norm(x + delta)) and x + delta for few tokens.

    Args:
        x: [B, K].
        delta: [B, K]; None is no delta.
        weight: [N, K].
        norm_weight: [K].
        eps: of the norm.

    Returns:
        [B, N] and [B, K].
    """
    if delta is None:
        return project(x, weight, norm_weight, eps), x
    total, normed = add_norm(x, delta, norm_weight, eps)
    return linear(normed, weight), total
