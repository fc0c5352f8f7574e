"""Convert a checkpoint to one file a rank: streamed, in bounded memory, resumable at layers.

A layer's modules are converted one expert at a time, cut by the plan, and appended to the ranks' files, which are
preallocated. When a layer is whole on the disk its checksums are noted in the manifest. A rerun reads what that calls
finished again, redoes what is missing or damaged, of those ranks alone, and goes on, so the result has the same
bytes as an unbroken run. One process at a time writes to a directory.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_k2.checkpoint.names import VISION
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.checkpoint.writer import RESUME, FileLayout, SafetensorsFile, tensor_bytes
from kimi_k2.config import KimiK2Config
from kimi_k2.contrib_model.checkpoint import Parameter
from kimi_k2.errors import CheckpointError
from kimi_k2.files import PARTIAL_SUFFIX, DirectoryLock
from kimi_k2.quantization.stored import TensorSpec
from kimi_k2.sharding.convert import CudaMapping, NeuronMapping, converted, modules_by_layer
from kimi_k2.sharding.experts import ConversionError
from kimi_k2.sharding.layout import GLOBAL_LAYER, Layout, PlannedTensor
from kimi_k2.sharding.manifest import (
    MANIFEST,
    VISION_FILE,
    WEIGHTS,
    Manifest,
    check_unchanged,
    describe,
    file_layout,
    identify,
    load_manifest,
    rank_file_name,
    tensor_entries,
)
from kimi_k2.sharding.plan import make_plan

# Each holds an expert: 90 MB at the real sizes.
THREADS = min(os.cpu_count() or 1, 8)
_VOCABULARY = ("model.embed_tokens", "lm_head")
_ROWS_BYTES = 2**25
# Stored bytes read, converted and written at a time: three experts of the real sizes. The dense layer's matrices
# have as many each, and twice that in BF16.
_IN_FLIGHT_BYTES = 2**27
# Experts are written together until they have this size: small ones would cost a system call a rank each.
_GROUP_BYTES = 2**25
# The disk starts early: with the operating system's own patience a layer would wait in memory until its end.
_EARLY = 2**28


class Presharder:
    """One conversion.

    Args:
        source: checkpoint directory.
        output: directory to write; with an unfinished conversion of the same source and options it is resumed, and a
            finished one is looked through: files that are gone or have another size or header are made again.
        layout: ranks and formats.
        report: measure the conversion error of the routed experts.
        allow_nonfinite: convert NaN, Inf and impossible scales too, whatever comes of them.
        verify_source: hash the source's bytes before and after; two runs then go together if these are equal, whatever
            the files' times.
        on_bytes: called with the bytes of input as they are done.
        on_layer: called with a layer's number and its error (None for a layer without converted experts).

    Attributes:
        looked_through: `run` found everything finished, and wrote nothing.

    Raises:
        ConfigError: sizes do not divide, or `output` holds something else.
        CheckpointError: the source is damaged or changes, the disk is full, or another process writes to `output` (from
            `run`, too).
        NonfiniteError: (from `run`) a tensor of the source holds NaN, Inf or impossible scales.
    """

    def __init__(
        self,
        source: str | Path,
        output: str | Path,
        layout: Layout,
        *,
        report: bool = True,
        allow_nonfinite: bool = False,
        verify_source: bool = False,
        on_bytes: Callable[[int], None] = lambda _: None,
        on_layer: Callable[[int, ConversionError | None], None] = lambda *_: None,
    ) -> None:
        self.output, self.layout, self.report, self.looked_through = Path(output), layout, report, False
        self.on_bytes, self.on_layer = on_bytes, on_layer
        self.config = KimiK2Config.from_pretrained(source)
        self.reader = CheckpointReader.for_config(source, self.config, vision=True, allow_nonfinite=allow_nonfinite)
        self.plan = make_plan(self.config, layout)
        self._source = identify(self.reader.directory, self.reader.index.shards, hash_bytes=verify_source)
        described = describe(self.config, layout, self._source)
        self.made_from = {**described, "report": report, "allow_nonfinite": allow_nonfinite}
        self._manifest = Manifest(self.output, self.plan, self.made_from)
        self._file = FileLayout.of(tensor.spec() for tensor in self.plan.tensors)
        self._paths = [self.output / WEIGHTS / rank_file_name(rank) for rank in range(layout.ranks)]
        self._sizes = {name: stored.nbytes for name, stored in self.reader.tensors.items()}
        names = [name for name in self.reader.names() if not VISION.match(name)]
        self._vision = [name for name in self.reader.names() if VISION.match(name)]
        self._modules = modules_by_layer(names)
        given = self.config, layout, names, partial(self.reader.get, check=False)
        self.mapping: NeuronMapping | CudaMapping
        if layout.target == "cuda":
            self.mapping = CudaMapping(*given, {tensor.name: tensor for tensor in self.plan.tensors})
        else:
            self.mapping = NeuronMapping(*given, by_rank=True)

    def run(self, *, verify_output: bool = False) -> dict[str, Any]:
        """Convert what is not yet converted; returns the manifest.

        Args:
            verify_output: compare what is there of a finished conversion with its checksums, and make again what
                differs.
        """
        weights = self.output / WEIGHTS
        try:
            weights.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot be made: {error.strerror}", file=weights) from None
        with DirectoryLock(self.output):
            found = self._manifest.take_up()
            # Files that an earlier run finished are not read again unless that is asked for.
            trusted = self._manifest.finished and not verify_output
            if trusted and self._is_whole():
                self.looked_through = True
                self._manifest.drop_unfinished()  # a run may have died between the two
                return load_manifest(self.output)
            self._check_space(weights)
            files, threads = list[SafetensorsFile](), torch.get_num_threads()
            torch.set_num_threads(1)  # experts are converted in parallel; a pool in each of them would only contend
            try:
                # What was reserved is given back where one cannot be.
                for path in self._paths:
                    files.append(SafetensorsFile(path, self._file, resume=found))
                if not found:
                    self._manifest.write()
                self._convert(files, {rank for rank, file in enumerate(files) if file.finished and trusted})
                for file in files:
                    file.finish()
            finally:
                torch.set_num_threads(threads)
                for file in files:
                    file.close(discard=len(files) < len(self._paths))
            tower = self._write_vision() if self.config.vision is not None else None
            check_unchanged(self.reader.directory, self._source)
            self._manifest.finish(tower)
            return self._manifest.content

    def _write_vision(self) -> dict[str, Any]:
        """Copy tower and projector as they are stored: the manifest's entry."""
        stored = self.reader.tensors
        layout = FileLayout.of(TensorSpec(name, stored[name].dtype, stored[name].shape) for name in self._vision)
        with SafetensorsFile(self.output / VISION_FILE, layout) as file:
            for name in self._vision:
                file.append(name, [tensor_bytes(self.reader.get(name))])
                self.on_bytes(layout.sizes[name])
        entries = tensor_entries(layout.specs.values())
        return {"file": VISION_FILE, "bytes": layout.nbytes, "tensors": entries, "checksums": file.sums}

    def _check_space(self, weights: Path) -> None:
        """Compare what the files need with what is free, before the first of them is made.

        Raises:
            CheckpointError: it is not there.
        """
        try:
            free, needed = shutil.disk_usage(weights).free, sum(self._sizes[name] for name in self._vision)
            for path in self._paths:
                paths = filter(Path.exists, (path.with_name(path.name + PARTIAL_SUFFIX), path))
                needed += max(0, self._file.nbytes - sum(there.stat().st_blocks * 512 for there in paths))
        except OSError:
            return  # a file system that does not say; the reservations will tell
        if needed > free:
            raise CheckpointError(
                f"the conversion needs {needed:,} bytes more, {free:,} are free; {RESUME}", file=weights
            )

    def _is_whole(self) -> bool:
        """Whether every file of a finished conversion is there with its size and header."""
        tower = load_manifest(self.output).get("vision") if self.config.vision is not None else None
        if tower is not None and not file_layout(tower).is_whole(self.output / VISION_FILE):
            return False
        return all(map(self._file.is_whole, self._paths))

    def _convert(self, files: list[SafetensorsFile], unread: set[int]) -> None:
        """Convert what is missing of each layer.

        Args:
            files: of the ranks.
            unread: ranks whose files are not compared with their checksums.
        """
        with ThreadPoolExecutor(THREADS) as pool, Flusher(files) as flusher:
            for layer, modules in self._modules.items():
                planned = {tensor.name: tensor for tensor in self.plan.layer(layer)}
                wanted, before = list(range(len(files))), self._manifest.checksums(planned)
                if before is not None:
                    ranks = [rank for rank in wanted if rank not in unread]
                    held = pool.map(lambda rank, sums=before: files[rank].holds(sums[rank]), ranks)
                    wanted = [rank for rank, holds in zip(ranks, held, strict=True) if not holds]
                if not wanted:
                    self.on_bytes(sum(self._sizes[name] for names in modules.values() for name in names))
                    continue
                cutter = Cutter(planned, {rank: files[rank] for rank in wanted}, pool)
                error = self._layer(layer, cutter, flusher)
                new_sums = cutter.finish()
                flusher.wait()
                sums = [
                    new_sums[rank] if before is None else new_sums.get(rank, before[rank]) for rank in range(len(files))
                ]
                if self._manifest.finished and sums != before:
                    fault = f"layer {layer} does not come out as the manifest says"
                    raise CheckpointError(fault, file=self.output / MANIFEST)
                flusher.end_layer(partial(self._durable, layer, error, sums))
            flusher.wait()

    def _durable(self, layer: int, error: ConversionError, sums: list[dict[str, str]]) -> None:
        """A layer is whole on the disk: say so."""
        names = (name for names in self._modules[layer].values() for name in names)
        shards = {self.reader.tensors[name].shard for name in names}
        check_unchanged(self.reader.directory, {shard: self._source[shard] for shard in shards})
        self._manifest.finish_layer(layer, error, sums)
        self.on_layer(layer, error if error.values else None)

    def _layer(self, layer: int, cutter: Cutter, flusher: Flusher) -> ConversionError:
        """Convert a layer, in several threads, and hand its parts on in order: the error of all of it."""
        convert = partial(converted, check=self.reader.check_module, report=self.report)
        error, unread = ConversionError(), dict(self._modules[layer])
        waiting: deque[tuple[int, Future[tuple[list[Parameter], ConversionError]]]] = deque()

        def write_next() -> None:
            nbytes, job = waiting.popleft()
            parameters, module_error = job.result()
            cutter.add(parameters)
            error.add(module_error)
            flusher.wrote(nbytes)
            self.on_bytes(nbytes)

        try:
            for module in self.mapping.outer() if layer == GLOBAL_LAYER else self.mapping.modules_of(layer):
                if module.sources and module.sources[0] in _VOCABULARY:
                    self._stream_rows(module.sources[0], cutter)
                    continue
                stored = [self.mapping.tensors_of(source) for source in module.sources]
                # A module may be read for what another became, and its bytes are counted once.
                nbytes = sum(self._sizes[name] for source in module.sources for name in unread.pop(source, ()))
                while waiting and nbytes + sum(count for count, _ in waiting) > _IN_FLIGHT_BYTES:
                    write_next()
                waiting.append((nbytes, cutter.pool.submit(convert, module, stored)))
                if len(waiting) > THREADS:
                    write_next()
            while waiting:
                write_next()
        finally:
            for _, unfinished in waiting:
                unfinished.cancel()
        return error

    def _stream_rows(self, module: str, cutter: Cutter) -> None:
        """Embedding and head, a few rows at a time: whole they are the largest tensors of all."""
        source = f"{module}.weight"
        tensor = cutter.planned[source if self.layout.target == "cuda" else source.removeprefix("model.")]
        rows = tensor.shape[0]
        share = rows // tensor.parts if tensor.dim == 0 else rows
        step = max(1, _ROWS_BYTES // (tensor.shape[1] * tensor.dtype.itemsize))
        for first in range(0, rows, share):
            for start in range(first, first + share, step):
                chunk = self.reader.get_slice(source, slice(start, min(start + step, first + share)))
                cutter.add_rows(tensor, chunk.to(tensor.dtype), first // share if tensor.dim == 0 else None)
                self.on_bytes(chunk.nbytes)


class Cutter:
    """One layer's parts on their way into the files.

    Experts must come in order. A rank's file is touched by one thread at a time.

    Args:
        planned: the layer's tensors by name.
        files: of the ranks that are written, by rank; the others have the layer already.
        pool: whose threads the ranks are divided among.
    """

    def __init__(
        self, planned: Mapping[str, PlannedTensor], files: Mapping[int, SafetensorsFile], pool: ThreadPoolExecutor
    ) -> None:
        self.planned, self.files, self.pool = planned, files, pool
        ranks = list(files)
        step = -(-len(ranks) // min(len(ranks), THREADS))
        self._shares = [ranks[first : first + step] for first in range(0, len(ranks), step)]
        self._experts: dict[str, list[Parameter]] = defaultdict(list)
        self._seen, self._waiting = Counter[str](), 0

    def add(self, parameters: list[Parameter]) -> None:
        """Take what one module or expert became; experts may be held back until there are enough to write."""
        for parameter in parameters:
            name, value, expert = parameter
            tensor = self.planned[name]
            shape = tensor.shape if expert is None else tensor.expert_shape
            if tuple(value.shape) != shape or value.dtype != tensor.dtype:
                expected, found = f"{tensor.dtype} {list(shape)}", f"{value.dtype} {list(value.shape)}"
                raise CheckpointError(f"planned {expected}, made {found}", tensor=name)
            if expert is not None:
                if expert != self._seen[name]:
                    raise CheckpointError("experts do not follow each other", tensor=name)
                self._seen[name] += 1
                self._experts[name].append(parameter)
                self._waiting += value.nbytes
        if expert is None:
            self._append(
                lambda rank: (
                    (name, [tensor_bytes(self.planned[name].local(value, rank))]) for name, value, _ in parameters
                )
            )
        elif self._waiting >= _GROUP_BYTES or (expert + 1) % len(tensor.experts_of(0)) == 0:
            self._append_experts()

    def _append_experts(self) -> None:
        groups = [
            (self.planned[name], parameters[0].expert, _by_rank(parameters))
            for name, parameters in self._experts.items()
        ]
        self._append(
            lambda rank: (
                (tensor.name, shares[rank % len(shares)])
                for tensor, first, shares in groups
                if first in tensor.experts_of(rank)
            )
        )
        self._experts.clear()
        self._waiting = 0

    def add_rows(self, tensor: PlannedTensor, rows: Tensor, holder: int | None) -> None:
        """Take rows of a matrix: for `holder`, or for every rank its columns of them."""
        self._append(
            lambda rank: [(tensor.name, [tensor_bytes(rows if rank == holder else tensor.local(rows, rank))])]
            if holder in (None, rank) else []
        )  # fmt: skip

    def _append(self, cuts: Callable[[int], Iterable[tuple[str, Sequence[memoryview]]]]) -> None:
        """Append to each rank's tensors what `cuts` gives of them."""

        def write(ranks: Sequence[int]) -> None:
            # Cutting, hashing and writing release the interpreter's lock.
            for rank in ranks:
                for name, pieces in cuts(rank):
                    self.files[rank].append(name, pieces)

        list(self.pool.map(write, self._shares))

    def finish(self) -> dict[int, dict[str, str]]:
        """Write what is held back; checksums by rank and name.

        Raises:
            MissingTensorError: a planned tensor was not fully made.
        """
        self._append_experts()
        return {rank: file.checksums(self.planned) for rank, file in self.files.items()}


def _by_rank(experts: list[Parameter]) -> list[list[memoryview]]:
    """Of each rank of those that share the experts, the bytes of each expert."""
    whole = [expert.tensor.view(len(expert.tensor), -1).view(torch.uint8).numpy() for expert in experts]
    return [[expert[share].data for expert in whole] for share in range(len(whole[0]))]


class Flusher:
    """Makes files durable, never more than one layer behind.

    Args:
        files: written by others meanwhile.

    Raises:
        CheckpointError: (from any method) an earlier flush failed.
    """

    def __init__(self, files: Sequence[SafetensorsFile]) -> None:
        self._files, self._unsent = files, 0
        self._pool = ThreadPoolExecutor(1)
        self._job: Future[None] | None = None

    def wrote(self, count: int) -> None:
        """So many more bytes were handed to the operating system."""
        self._unsent += count
        if self._unsent >= _EARLY and (self._job is None or self._job.done()):
            self.end_layer(lambda: None)

    def end_layer(self, then: Callable[[], None]) -> None:
        """Flush all that was written, then call `then`; waits until the layer before has come so far."""
        self.wait()

        def flush() -> None:
            for file in self._files:
                file.sync()
            then()

        self._unsent, self._job = 0, self._pool.submit(flush)

    def wait(self) -> None:
        """Until everything is done."""
        if self._job is not None:
            self._job.result()

    def __enter__(self) -> Flusher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
