"""Tensors of the output with their cuts, as data, and the proof that the cuts cover everything once."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.sharding.layout import GLOBAL_LAYER, Layout

Region = tuple[slice, ...]


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the output and how it is cut.

    Attributes:
        name, dtype, shape: of the whole tensor, before it is cut.
        layer: decoder layer, or GLOBAL_LAYER.
        dim: dimension cut over `parts` ranks; None if it is not.
        stride: equal sections of `dim`, each of which is cut (2 for gate and up side by side).
        parts: ranks that share a copy.
        expert_groups: groups that dimension 0 is divided among.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    layer: int
    dim: int | None = None
    stride: int = 1
    parts: int = 1
    expert_groups: int = 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on each rank."""
        shape = list(self.shape)
        if self.dim is not None:
            shape[self.dim] //= self.parts
        if self.expert_groups > 1:
            shape[0] //= self.expert_groups
        return tuple(shape)

    @property
    def kind(self) -> str:
        """In words, for a table."""
        words = [] if self.dim is None else [f"dim {self.dim} / {self.parts}"]
        if self.stride > 1:
            words.append(f"stride {self.stride}")
        if self.expert_groups > 1:
            words.append(f"experts / {self.expert_groups}")
        return ", ".join(words) or "replicated"

    def spec(self) -> TensorSpec:
        """Name, dtype and shape in a rank's file."""
        return TensorSpec(self.name, self.dtype, self.local_shape)

    def experts_of(self, rank: int) -> range:
        """Rows of dimension 0 on `rank` if experts are divided; all of them otherwise."""
        count = self.shape[0] // self.expert_groups
        first = rank // self.parts % self.expert_groups * count
        return range(first, first + count)

    def cuts(self, rank: int) -> list[slice]:
        """Slices of dimension `dim` that rank holds, in order."""
        assert self.dim is not None
        section = self.shape[self.dim] // self.stride
        width, part = section // self.parts, rank % self.parts
        return [slice(s * section + part * width, s * section + (part + 1) * width) for s in range(self.stride)]

    def local(self, whole: Tensor, rank: int) -> Tensor:
        """A rank's slice of the whole tensor, contiguous."""
        if self.dim is None:  # of a group of ranks, whole
            held = self.experts_of(rank)
            return whole[held.start : held.stop]
        pieces = [whole.narrow(self.dim, cut.start, cut.stop - cut.start) for cut in self.cuts(rank)]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, self.dim)

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Of one expert by rank: [1, ...] where the ranks that share it all hold the same, else [parts, ...]."""
        return (1 if self.dim is None else self.parts, *self.local_shape[1:])

    def by_rank(self, expert: Tensor) -> Tensor:
        """One expert's whole tensor to `expert_shape`, contiguous: what each rank of those that share it holds."""
        if self.dim is None:
            return expert.contiguous().unsqueeze(0)
        dim = self.dim - 1
        cut = expert.unflatten(dim, (self.stride, self.parts, -1)).movedim(dim + 1, 0)
        out: Tensor = cut.contiguous().flatten(dim + 1, dim + 2)
        return out

    def regions(self, rank: int) -> list[Region]:
        """Boxes of the whole tensor that `rank` holds; concatenated along `dim` they are its local tensor."""
        whole = [slice(0, size) for size in self.shape]
        if self.expert_groups > 1:
            experts = self.experts_of(rank)
            whole[0] = slice(experts.start, experts.stop)
        if self.dim is None:
            return [tuple(whole)]
        return [(*whole[: self.dim], cut, *whole[self.dim + 1 :]) for cut in self.cuts(rank)]


@dataclass(frozen=True)
class ShardingPlan:
    """All tensors of all ranks, in file order."""

    config: KimiK2Config
    layout: Layout
    tensors: tuple[PlannedTensor, ...]

    def layer(self, layer: int) -> list[PlannedTensor]:
        """Tensors of one layer."""
        return [tensor for tensor in self.tensors if tensor.layer == layer]

    def of_layers(self, layers: range | None) -> list[PlannedTensor]:
        """Tensors of some layers, None for all, and those of no layer."""
        return [one for one in self.tensors if layers is None or one.layer == GLOBAL_LAYER or one.layer in layers]

    def check(self) -> None:
        """Prove that every element of every tensor is in one rank's file, or in equally many if it is replicated.

        Raises:
            CheckpointError: an element is missing or belongs to two different slices.
        """
        seen = set()
        for tensor in self.tensors:
            key = (tensor.shape, tensor.dim, tensor.stride, tensor.parts, tensor.expert_groups)
            if key not in seen:
                seen.add(key)
                _check_cover(tensor, self.layout.ranks)


def _check_cover(tensor: PlannedTensor, ranks: int) -> None:
    copies: dict[tuple[tuple[int, int], ...], int] = {}
    for rank in range(ranks):
        for region in tensor.regions(rank):
            box = tuple((cut.start, cut.stop) for cut in region)
            copies[box] = copies.get(box, 0) + 1
    if len(set(copies.values())) != 1:
        raise CheckpointError("slices are held by different numbers of ranks", tensor=tensor.name)
    covered = sum(math.prod(stop - start for start, stop in box) for box in copies)
    if covered != math.prod(tensor.shape):
        raise CheckpointError(f"slices hold {covered} of {math.prod(tensor.shape)} elements", tensor=tensor.name)
    for a, b in itertools.combinations(copies, 2):
        if all(max(x[0], y[0]) < min(x[1], y[1]) for x, y in zip(a, b, strict=True)):
            raise CheckpointError(f"slices {a} and {b} overlap", tensor=tensor.name)
