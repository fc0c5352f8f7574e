"""The latent cache and the queries that meet it, in SBUF: one sequence's slots, in one piece or in pages."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK

# Tiles a DMA: one run of 8 KiB a partition of BF16 latents.
_TILES_A_DMA = 8


class Queries(nl.NKIObject):  # type: ignore[misc]
    """Queries and new entries of B sequences, as columns in SBUF.

    Of several tokens a sequence (`join_tokens`) heads are those of all its tokens, a token's after the other's, and new
    entries lie in the same order, [.., B * tokens].

    Attributes:
        tokens: of each sequence.
        latent: [128, rank / 128, B * heads], absorbed.
        rope: [copies * rope, copies, B, heads], rotated, for `copies_of_keys` tiles: those of tile c lie on its rows,
            from c * rope on, in column c, with zeros in the others.
        heads: of each sequence.
        new_latent: [128, rank / 128, B].
        new_key: [rope, B], rotated.
        factor: float32 [128, 2, B], by the first of which scores are still to be multiplied.
        late: a `LateEntries` that makes the new entries.
    """

    new_latent: Any
    new_key: Any
    tokens: int

    def __init__(self, latent: Any, rope: Any, heads: int, factor: Any, late: Any) -> None:
        self.latent, self.rope, self.heads, self.factor, self.late = latent, rope, heads, factor, late
        self.new_latent = None
        self.new_key = None
        self.tokens = 1

    def join_tokens(self, tokens: int) -> None:
        """Make sequences of `tokens` that follow each other, each of which was one until now."""
        rows, copies, count = self.rope.shape[0], self.rope.shape[1], self.rope.shape[2]
        self.tokens, self.heads = tokens, self.heads * tokens
        self.rope = self.rope.reshape((rows, copies, count // tokens, self.heads))

    def complete(self) -> None:
        """Make the new entries, where scores of cached slots come first."""
        if self.new_key == None:
            new_latent, new_key = self.late.entries()
            self.new_latent, self.new_key = new_latent, new_key


def rows_of_keys(rope: int, batch: int, heads: int, dtype: Any) -> Any:
    """A tile for `Queries.rope`, of zeros."""
    copies = copies_of_keys(rope)
    rows = nl.ndarray((copies * rope, copies, batch, heads), dtype=dtype, buffer=nl.sbuf)
    if copies > 1:
        nisa.memset(dst=rows, value=0.0, engine=nisa.engine.gpsimd)
    return rows


def copies_of_keys(rope: int) -> int:
    """How many tiles' rotary keys one transpose turns; tile t's lie from partition t % copies * rope on."""
    return BLOCK // rope if rope == 32 or rope == 64 else 1


class Cache(nl.NKIObject):  # type: ignore[misc]
    """One sequence's cache in SBUF: slot p * count + t of this core's share on partition p of tile t.

    Attributes:
        tiles: of each the latents in chunks of 128 values, [128, 128].
    """

    turned: list[Any]
    turned_keys: list[Any]

    def __init__(
        self, latents: Any, keys: Any, sequence: int, first: int, count: int, identity: Any, pages: Any = None
    ) -> None:
        self.rank, self.rope, self.identity = latents.shape[2], keys.shape[2], identity
        self.copies = copies_of_keys(self.rope)
        self.tiles = []
        self.key_groups = []
        self.turned = []
        self.turned_keys = []
        for begin in range(0, count, _TILES_A_DMA):
            many = min(_TILES_A_DMA, count - begin)
            if pages == None:
                parts = [_load_slots(latents, sequence, first, count, begin, many)]
                key_tile = _load_slots(keys, sequence, first, count, begin, many)
            else:
                parts, key_tile = pages.load(sequence, first, count, begin, many)
            each = self.rank // len(parts)
            for tile in range(many):
                chunks = []
                for chunk in range(self.rank // BLOCK):
                    part, at = parts[chunk * BLOCK // each], chunk * BLOCK % each
                    chunks.append(part[:, tile, at : at + BLOCK])
                self.tiles.append(chunks)
                self.turned.append(None)
            for tile in range(0, many, self.copies):
                self.key_groups.append(key_tile[:, tile : min(tile + self.copies, many), :])
                self.turned_keys.append(None)

    def turn(self, tile: int) -> None:
        """Transpose a tile, and the keys of its group with the group's first tile."""
        group = tile // self.copies
        if tile % self.copies == 0:
            keys = self.key_groups[group]
            size = keys.shape[1] * self.rope
            in_psum = nl.ndarray((size, BLOCK), dtype=keys.dtype, buffer=nl.psum)
            nisa.nc_matmul(dst=in_psum, stationary=keys, moving=self.identity, is_transpose=True)
            self.turned_keys[group] = nl.ndarray((size, BLOCK), dtype=keys.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=self.turned_keys[group], src=in_psum, engine=nisa.engine.vector)
        chunks = self.rank // BLOCK
        pieces, dtype = self.tiles[tile], self.identity.dtype
        in_psum = nl.ndarray((BLOCK, chunks, BLOCK), dtype=dtype, buffer=nl.psum)
        for chunk in range(chunks):
            nisa.nc_matmul(dst=in_psum[:, chunk, :], stationary=pieces[chunk], moving=self.identity, is_transpose=True)
        self.turned[tile] = nl.ndarray((BLOCK, chunks, BLOCK), dtype=dtype, buffer=nl.sbuf)
        # Vector and Scalar Engine both read PSUM: each takes a share, the faster one more.
        engine = nisa.engine.scalar if tile % 5 == 1 or tile % 5 == 4 else nisa.engine.vector
        nisa.tensor_copy(dst=self.turned[tile], src=in_psum, engine=engine)

    def score_latents(self, tile: int, queries: Queries, first: int, heads: int, out: Any) -> None:
        """What latents add to a tile's unscaled scores of queries `first` and on: out [128, heads] in PSUM."""
        if self.turned[tile] == None:
            self.turn(tile)
        turned = self.turned[tile]
        for chunk in range(self.rank // BLOCK):
            moving = queries.latent[:, chunk, first : first + heads]
            nisa.nc_matmul(dst=out, stationary=turned[:, chunk, :], moving=moving, accumulate=chunk > 0)

    def score_keys(self, group: int, queries: Queries, sequence: int, out: Any) -> None:
        """What rotary keys add to the scores of a group's tiles: out [128, tiles, heads] in PSUM."""
        keys = self.turned_keys[group]
        moving = queries.rope[0 : keys.shape[0], 0 : out.shape[1], sequence, :]
        nisa.nc_matmul(dst=out, stationary=keys, moving=moving, accumulate=True)


def _load_slots(table: Any, sequence: int, first: int, count: int, begin: int, many: int) -> Any:
    """Tiles `begin` and on of a core's slots, from [B, S, n] in HBM: [128, many, n] in SBUF."""
    width = table.shape[2]
    tile = nl.ndarray((BLOCK, many, width), dtype=table.dtype, buffer=nl.sbuf)
    offset = (sequence * table.shape[1] + first * BLOCK + begin) * width
    source = table.ap(pattern=[[count * width, BLOCK], [width, many], [1, width]], offset=offset)
    nisa.dma_copy(dst=tile, src=source)
    return tile


class Part(nl.NKIObject):  # type: ignore[misc]
    """Shape [B, S, n] and dtype of what lies in pages."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype


class Pages(nl.NKIObject):  # type: ignore[misc]
    """Caches that lie in pages, in HBM: an entry is a row of `former` and one of `latter`.

    Each has half of the latents, in whole chunks of 128, and behind them half of the rotary key.

    Args:
        former, latter: halves of all slots' entries, [blocks, 1, block, (rank + rope) / 2] or [blocks, block, 1, ..].
        runs: int32 [B, S / each], where a sequence's slots lie, `each` after each other.
        each: that divides 8 and the tiles of a core.
        rank, rope: of an entry.

    Attributes:
        latents, keys: `Part` of each.
    """

    def __init__(self, former: Any, latter: Any, runs: Any, each: int, rank: int, rope: int) -> None:
        self.half, self.each, self.runs = former.shape[3], each, runs
        count = former.shape[0] * former.shape[1] * former.shape[2]
        run = (count // each, each * self.half)
        self.halves = (former.reshape(run), latter.reshape(run))
        batch, slots = runs.shape[0], runs.shape[1] * each
        self.latents = Part((batch, slots, rank), former.dtype)
        self.keys = Part((batch, slots, rope), former.dtype)

    def load(self, sequence: int, first: int, count: int, begin: int, many: int) -> tuple[list[Any], Any]:
        """`_load_slots` of the halves, latents first, and of keys: by the numbers of their runs."""
        each, half = self.each, self.half
        numbers = nl.ndarray((BLOCK, many // each), dtype=nl.int32, buffer=nl.sbuf)
        offset = sequence * self.runs.shape[1] + (first * BLOCK + begin) // each
        nisa.dma_copy(dst=numbers, src=self.runs.ap(pattern=[[count // each, BLOCK], [1, many // each]], offset=offset))
        rope, dtype = self.keys.shape[2], self.latents.dtype
        key = nl.ndarray((BLOCK, many, rope), dtype=dtype, buffer=nl.sbuf)
        loaded = []
        for number in range(2):
            table = self.halves[number]
            tile = nl.ndarray((BLOCK, many // each, each * half), dtype=dtype, buffer=nl.sbuf)
            for run in range(many // each):
                pattern = [[each * half, BLOCK], [1, each * half]]
                source = table.ap(pattern=pattern, offset=0, vector_offset=numbers[:, run : run + 1], indirect_dim=0)
                nisa.dma_copy(dst=tile[:, run, :], src=source)
            slots = tile.reshape((BLOCK, many, half))
            low, size = number * rope // 2, rope // 2
            nisa.tensor_copy(dst=key[:, :, low : low + size], src=slots[:, :, half - size : half])
            loaded.append(slots)
        return loaded, key
