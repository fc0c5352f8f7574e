"""One layer's parts on their way into the ranks' files: cut by the plan, written, hashed, and flushed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from kimi_k2.checkpoint.writer import tensor_bytes
from kimi_k2.errors import CheckpointError, MissingTensorError
from kimi_k2.sharding.convert import Part
from kimi_k2.sharding.layout import PlannedTensor
from kimi_k2.sharding.rank_file import Digest, MakeDigest, RankFile

# Experts are written together until they have this size: small ones would cost a system call a rank each.
_GROUP_BYTES = 2**25
# The disk starts early: with the operating system's own patience a layer would wait in memory until its end.
_EARLY = 2**28


class LayerSink:
    """Cuts parts by the plan, writes them to the ranks' files and keeps checksums of whole tensors.

    Experts must come in order. A rank's file is touched by one thread at a time.

    Args:
        planned: the layer's tensors by name.
        ranks: the files.
        wanted: numbers of the ranks that are written; the others have the layer already.
        threads: among which the ranks are divided.
        digest: of the checksums.
    """

    def __init__(
        self,
        planned: dict[str, PlannedTensor],
        ranks: list[RankFile],
        wanted: Sequence[int],
        threads: int,
        digest: MakeDigest,
    ) -> None:
        self.planned, self.ranks, self.wanted, self.threads, self.digest = planned, ranks, wanted, threads, digest
        self._digests: dict[int, dict[str, Digest]] = {rank: defaultdict(digest) for rank in wanted}
        self._written: dict[int, dict[str, int]] = {rank: defaultdict(int) for rank in wanted}
        self._experts: dict[str, list[Part]] = defaultdict(list)
        self._waiting = 0

    def add(self, parts: list[Part], pool: ThreadPoolExecutor) -> None:
        """Take what one module or expert became; experts may be held back until there are enough to write."""
        if parts[0].expert is None:
            self.write(parts, pool)
            return
        for part in parts:
            self._check(part, self.planned[part.name].expert_shape)
            self._experts[part.name].append(part)
            self._waiting += part.tensor.nbytes
        local = self.planned[parts[0].name].experts_of(0)
        if self._waiting >= _GROUP_BYTES or (parts[0].expert + 1) % len(local) == 0:
            self._write_experts(pool)

    def _write_experts(self, pool: ThreadPoolExecutor) -> None:
        groups = [(self.planned[name], parts[0].expert, _shares(parts)) for name, parts in self._experts.items()]

        def write(ranks: Sequence[int]) -> None:
            # Hashing and writing release the interpreter's lock.
            for rank in ranks:
                for tensor, first, shares in groups:
                    assert first is not None
                    rank_experts = tensor.experts_of(rank)
                    if first not in rank_experts:
                        continue
                    pieces = shares[rank % len(shares)]
                    if (first - rank_experts.start) * len(pieces[0]) != self._written[rank][tensor.name]:
                        raise CheckpointError("experts do not follow each other", tensor=tensor.name)
                    self._append(rank, tensor, pieces)

        self._over_ranks(write, pool)
        self._experts.clear()
        self._waiting = 0

    def write(self, parts: list[Part], pool: ThreadPoolExecutor) -> None:
        """Write whole tensors, to every rank its cut of them."""
        for part in parts:
            self._check(part, self.planned[part.name].shape)
        shared = {part.name: tensor_bytes(part.tensor) for part in parts if self._is_of_all(part.name)}
        digests = {name: self.digest() for name in shared}  # once for all ranks
        for name, data in shared.items():
            digests[name].update(data)

        def write(ranks: Sequence[int]) -> None:
            # Cutting, hashing and writing release the interpreter's lock.
            for rank in ranks:
                for part in parts:
                    tensor, data = self.planned[part.name], shared.get(part.name)
                    if data is None:
                        self._append(rank, tensor, [tensor_bytes(tensor.local(part.tensor, rank))])
                    else:
                        self._written[rank][part.name] = self.ranks[rank].write(part.name, [data], 0)
                        self._digests[rank][part.name] = digests[part.name]

        self._over_ranks(write, pool)

    def _is_of_all(self, name: str) -> bool:
        """Whether every rank holds all of a tensor."""
        return self.planned[name].dim is None and self.planned[name].expert_groups == 1

    def _check(self, part: Part, shape: tuple[int, ...]) -> None:
        dtype = self.planned[part.name].dtype
        if tuple(part.tensor.shape) != shape or part.tensor.dtype != dtype:
            raise CheckpointError(
                f"planned {dtype} {list(shape)}, made {part.tensor.dtype} {list(part.tensor.shape)}", tensor=part.name
            )

    def write_rows(self, tensor: PlannedTensor, rows: Tensor, holder: int | None, pool: ThreadPoolExecutor) -> None:
        """Append rows of a matrix: to `holder`, or to every rank its columns of them."""
        if holder is not None:
            if holder in self._written:
                self._append(holder, tensor, [tensor_bytes(rows)])
            return

        def write(ranks: Sequence[int]) -> None:
            for rank in ranks:
                self._append(rank, tensor, [tensor_bytes(tensor.local(rows, rank))])

        self._over_ranks(write, pool)

    def _over_ranks(self, write: Callable[[Sequence[int]], None], pool: ThreadPoolExecutor) -> None:
        count = len(self.wanted)
        step = -(-count // min(count, self.threads))
        list(pool.map(write, (self.wanted[first : first + step] for first in range(0, count, step))))

    def _append(self, rank: int, tensor: PlannedTensor, pieces: Sequence[memoryview]) -> None:
        written = self.ranks[rank].write(tensor.name, pieces, self._written[rank][tensor.name])
        for piece in pieces:
            self._digests[rank][tensor.name].update(piece)
        self._written[rank][tensor.name] += written

    def finish(self, pool: ThreadPoolExecutor) -> dict[int, dict[str, str]]:
        """Write what is held back; checksums by rank and name.

        Raises:
            MissingTensorError: a planned tensor was not fully written.
        """
        if self._experts:
            self._write_experts(pool)
        for written in self._written.values():
            for name, tensor in self.planned.items():
                if written[name] != tensor.spec().nbytes:
                    raise MissingTensorError("planned, but not (fully) made", tensor=name)
        return {
            rank: {name: digest.hexdigest() for name, digest in digests.items()}
            for rank, digests in self._digests.items()
        }


class Flusher:
    """Makes files durable, never more than one layer behind.

    Args:
        files: written by others meanwhile.

    Raises:
        CheckpointError: (from any method) an earlier flush failed.
    """

    def __init__(self, files: Sequence[RankFile]) -> None:
        self._files = files
        self._pool, self._unsent = ThreadPoolExecutor(1), 0
        self._early: Future[None] | None = None
        self._layer: Future[None] | None = None

    def wrote(self, count: int) -> None:
        """So many more bytes were handed to the operating system."""
        self._unsent += count
        if self._unsent >= _EARLY and (self._early is None or self._early.done()):
            self._wait(self._early)
            self._unsent = 0
            self._early = self._pool.submit(self._sync)

    def end_layer(self, then: Callable[[], None]) -> None:
        """Flush all that was written, then call `then`; waits until the layer before has come so far."""
        self.wait()

        def flush() -> None:
            self._sync()
            then()

        self._unsent = 0
        self._layer = self._pool.submit(flush)

    def wait(self) -> None:
        """Until everything is done."""
        self._wait(self._early)
        self._wait(self._layer)

    @staticmethod
    def _wait(job: Future[None] | None) -> None:
        if job is not None:
            job.result()

    def _sync(self) -> None:
        for file in self._files:
            file.sync()

    def __enter__(self) -> Flusher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()


def _shares(experts: list[Part]) -> list[list[memoryview]]:
    """Of each rank of those that share the experts, the bytes of each expert."""
    whole = [part.tensor.view(len(part.tensor), -1).view(torch.uint8).numpy() for part in experts]
    return [[one[share].data for one in whole] for share in range(len(whole[0]))]
