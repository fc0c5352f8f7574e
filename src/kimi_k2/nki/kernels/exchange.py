"""What kernels at LNC=2 share: the halves of the two cores, and sums over both."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

BANK_BYTES = 2048  # of PSUM, a partition
PARTITIONS = 128


def share_of(count: int) -> tuple[int, int]:
    """First and number of `count` items that this core takes."""
    cores = nl.num_programs()
    each = (count + cores - 1) // cores
    first = nl.program_id() * each
    return first, min(each, count - first)


def from_other_core(tile: Any, pipe_id: int = 0) -> Any:
    """The other core's tile of the same shape, in SBUF."""
    received = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
    other = 1 - nl.program_id()
    nisa.sendrecv(src=tile, dst=received, send_to_rank=other, recv_from_rank=other, pipe_id=pipe_id)
    return received


def add_over_cores(tile: Any, pipe_id: int = 0) -> None:
    """Add the other core's tile to this one; nothing at LNC=1.

    Both cores add in the same order, so that they go on with the same bits.
    """
    if nl.num_programs() == 1:
        return
    received = from_other_core(tile, pipe_id)
    if nl.program_id() == 0:
        nisa.tensor_tensor(dst=tile, data1=tile, data2=received, op=nl.add)
    else:
        nisa.tensor_tensor(dst=tile, data1=received, data2=tile, op=nl.add)


class OwnTokens(nl.NKIObject):  # type: ignore[misc]
    """What a core works on: half of an even number of tokens, in whole rows, or for all tokens half of the blocks.

    A row's run in HBM is then twice as long, and nothing is exchanged between an expert's two parts. Where other ranks
    hold experts tokens are not divided: one core's would be more of them than the other's.

    Args:
        tokens, blocks: of the call.
        holds_all: the rank holds all experts.
        double: columns of gate and up side by side.
        parts: that a value is multiplied as.

    Attributes:
        divided: each core has tokens of its own.
        begin, tokens: this core's.
        first, count: its blocks.
    """

    def __init__(self, tokens: int, blocks: int, holds_all: bool, double: int, parts: int) -> None:
        pairs = 8 // max(1, PARTITIONS // double)
        fits = 4 * pairs * blocks * parts <= BANK_BYTES
        self.divided = nl.num_programs() == 2 and tokens % 2 == 0 and blocks % 2 == 0 and holds_all and fits
        self.begin, self.tokens = 0, tokens
        self.first, self.count = share_of(blocks)
        if self.divided:
            self.begin, self.tokens = share_of(tokens)
            self.first, self.count = 0, blocks

    def all_blocks(self, values: Any) -> Any:
        """From this core's half of the blocks of all tokens, float32 [128, n / 2, T]: its tokens' [128, n, T / 2]."""
        half, tokens = values.shape[1], self.tokens
        other = tokens - self.begin
        sent = nl.ndarray((PARTITIONS, half, tokens), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=sent, src=values[:, :, other : other + tokens])
        taken = from_other_core(sent, 1)
        whole = nl.ndarray((PARTITIONS, self.count, tokens), dtype=nl.float32, buffer=nl.sbuf)
        mine, theirs = nl.program_id() * half, (1 - nl.program_id()) * half
        nisa.tensor_copy(dst=whole[:, mine : mine + half, :], src=values[:, :, self.begin : self.begin + tokens])
        nisa.tensor_copy(dst=whole[:, theirs : theirs + half, :], src=taken)
        return whole
