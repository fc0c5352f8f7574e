"""Convert a checkpoint to one file a rank: streamed, in bounded memory, resumable at layers.

Every rank's file is preallocated. A layer's parts are converted one expert at a time, cut by the plan and written to
their places. When a layer is whole on the disk its checksums are appended to a journal. A rerun reads what the journal
calls finished again, redoes what is missing or damaged, of those ranks alone, and goes on, so the result has the same
bytes as an unbroken run. One process at a time writes to a directory.
"""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kimi_k2.checkpoint.names import VISION
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.checkpoint.writer import tensor_bytes
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError
from kimi_k2.files import PARTIAL_SUFFIX, DirectoryLock
from kimi_k2.quantization.stored import Stored, TensorSpec
from kimi_k2.sharding.convert import Part, converted, mapping_for, modules_by_layer
from kimi_k2.sharding.experts.format import ConversionError
from kimi_k2.sharding.layout import GLOBAL_LAYER, Layout
from kimi_k2.sharding.manifest import (
    JOURNAL,
    MANIFEST,
    VISION_FILE,
    WEIGHTS,
    Finished,
    FinishedLayer,
    Journal,
    check_unchanged,
    describe,
    earlier,
    file_layout,
    identify,
    load_manifest,
    rank_file_name,
    tensor_entries,
    write_manifest,
)
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.rank_files import (
    CHECKSUM,
    RESUME,
    FileLayout,
    Flusher,
    LayerSink,
    MakeDigest,
    RankFile,
    digest_maker,
    open_files,
)

# Each holds an expert: 90 MB at the real sizes.
THREADS = min(os.cpu_count() or 1, 8)
_VOCABULARY = ("model.embed_tokens", "lm_head")
_ROWS_BYTES = 2**25
# Stored bytes read, converted and written at a time: three experts of the real sizes. The dense layer's matrices
# have as many each, and twice that in BF16.
_IN_FLIGHT_BYTES = 2**27


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
        self.plan.check()
        self._source = identify(self.reader.directory, self.reader.index.shards, hash_bytes=verify_source)
        described = describe(self.config, layout, self._source)
        self.made_from = {**described, "report": report, "allow_nonfinite": allow_nonfinite}
        self._journal = Journal(self.output / JOURNAL)
        self._file = FileLayout.of(tensor.spec() for tensor in self.plan.tensors)
        self._paths = [self.output / WEIGHTS / rank_file_name(rank) for rank in range(layout.ranks)]
        names = [name for name in self.reader.names() if not VISION.match(name)]
        self._modules = modules_by_layer(names)
        planned = {tensor.name: tensor for tensor in self.plan.tensors}
        self.mapping = mapping_for(self.config, layout, names, partial(self.reader.get, check=False), planned)
        self._vision = [name for name in self.reader.names() if VISION.match(name)]

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
            repair, found = (self.output / MANIFEST).exists(), earlier(self.output, self.plan, self.made_from)
            if repair and not verify_output and self._is_whole():
                self.looked_through = True
                self._journal.remove()  # a run may have died between the two
                return load_manifest(self.output)
            # An earlier run may have begun with another kind of checksum; then all of them are of that kind.
            finished = found or Finished(self.made_from, CHECKSUM, {})
            digest = digest_maker(finished.checksum, self.output)
            self._check_space(weights)
            files = open_files(self._paths, self._file, resume=found is not None)
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # experts are converted in parallel; a pool in each of them would only contend
            try:
                # Files that an earlier run finished are not read again unless that is asked for.
                unread = [rank for rank, file in enumerate(files) if file.finished and repair and not verify_output]
                if found is None:
                    self._journal.begin(self.made_from, CHECKSUM)
                self._convert_all(files, finished, digest, None if not repair else set(unread))
                for file in files:
                    file.finish()
            finally:
                torch.set_num_threads(threads)
                for file in files:
                    file.close()
            tower = self._write_vision(digest) if self.config.vision is not None else None
            check_unchanged(self.reader.directory, self._source)
            manifest = write_manifest(self.output, finished, self.plan, tower)
            self._journal.remove()
            return manifest

    def _write_vision(self, digest: MakeDigest) -> dict[str, Any]:
        """Copy tower and projector as they are stored: the manifest's entry."""
        stored = self.reader.tensors
        layout = FileLayout.of(TensorSpec(name, stored[name].dtype, stored[name].shape) for name in self._vision)
        file, sums = RankFile(self.output / VISION_FILE, layout, resume=False), {}
        try:
            for name in sorted(self._vision):
                data = tensor_bytes(self.reader.get(name))
                checksum = digest()
                checksum.update(data)
                sums[name] = checksum.hexdigest()
                self.on_bytes(file.write(name, [data], 0))
            file.finish()
        finally:
            file.close(discard=not file.finished)
        entries = tensor_entries(layout.specs.values())
        return {"file": VISION_FILE, "bytes": layout.nbytes, "tensors": entries, "checksums": sums}

    def _check_space(self, weights: Path) -> None:
        """Compare what the files need with what is free, before the first of them is made.

        Raises:
            CheckpointError: it is not there.
        """
        try:
            free, needed = shutil.disk_usage(weights).free, 0
            for path in self._paths:
                there = next((one for one in (path.with_name(path.name + PARTIAL_SUFFIX), path) if one.exists()), None)
                needed += max(0, self._file.nbytes - (there.stat().st_blocks * 512 if there else 0))
        except OSError:
            return  # a file system that does not say; the reservations will tell
        needed += sum(self.reader.tensors[name].nbytes for name in self._vision)
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

    def _convert_all(
        self, files: list[RankFile], finished: Finished, digest: MakeDigest, unread: set[int] | None
    ) -> None:
        """Convert what is missing of each layer, into `finished` too.

        Args:
            files: of the ranks.
            finished: what an earlier run finished.
            digest: of the checksums.
            unread: in a finished conversion that is mended, ranks whose files are not compared with their checksums;
                None in one that is under way.
        """
        every, repair = range(self.layout.ranks), unread is not None
        with ThreadPoolExecutor(THREADS) as pool, Flusher(files) as flusher:
            for layer, groups in self._modules.items():
                done, wanted = finished.layers.get(layer), list(every)
                before: list[dict[str, str]] = [{}] * len(every)
                if done is not None:
                    before = done.checksums
                    ranks = [rank for rank in every if rank not in (unread or ())]
                    held = pool.map(lambda rank, sums=before: files[rank].holds(sums[rank], digest), ranks)
                    wanted = [rank for rank, holds in zip(ranks, held, strict=True) if not holds]
                names = [name for names in groups.values() for name in names]
                if not wanted:
                    self.on_bytes(sum(self.reader.tensors[name].nbytes for name in names))
                    continue
                planned = {tensor.name: tensor for tensor in self.plan.layer(layer)}
                sink = LayerSink(planned, files, wanted, pool, THREADS, digest)
                error = self._layer(layer, sink, flusher)
                checksums = sink.finish()
                flusher.wait()
                sums = [checksums.get(rank, before[rank]) for rank in every]
                made = FinishedLayer(layer, error.as_dict() if error.values else None, sums)
                if repair and sums != before:
                    raise CheckpointError(
                        f"layer {layer} does not come out as the manifest says", file=self.output / MANIFEST
                    )
                finished.layers[layer] = made
                shards = {self.reader.tensors[name].shard for name in names}
                flusher.end_layer(partial(self._durable, made, error, shards, journal=not repair))
            flusher.wait()

    def _durable(self, layer: FinishedLayer, error: ConversionError, shards: set[str], *, journal: bool) -> None:
        """A layer is whole on the disk: say so in the journal."""
        check_unchanged(self.reader.directory, {shard: self._source[shard] for shard in shards})
        if journal:
            self._journal.finish_layer(layer)
        self.on_layer(layer.layer, error if error.values else None)

    # -- one layer -----------------------------------------------------------------------------------

    def _layer(self, layer: int, sink: LayerSink, flusher: Flusher) -> ConversionError:
        """Convert a layer into a sink: the error of all of it."""
        groups, pool = self._modules[layer], sink.pool
        convert = partial(converted, check=self.reader.check_module, report=self.report)
        error = ConversionError()
        seen: set[str] = set()  # a module may be read for what another became, and its bytes are counted once
        waiting: deque[tuple[int, Future[tuple[list[Part], ConversionError]]]] = deque()

        def write_next() -> None:
            nbytes, job = waiting.popleft()
            parts, part_error = job.result()
            sink.add(parts)
            error.add(part_error)
            flusher.wrote(nbytes)
            self.on_bytes(nbytes)

        try:
            for module in self.mapping.outer() if layer == GLOBAL_LAYER else self.mapping.modules_of(layer):
                if module.sources and module.sources[0] in _VOCABULARY:
                    self._stream_rows(module.sources[0], sink)
                    continue
                stored = [self._stored(source, groups) for source in module.sources]
                first = [one for source, one in zip(module.sources, stored, strict=True) if source not in seen]
                nbytes = sum(tensor.nbytes for one in first for tensor in one.values())
                seen.update(module.sources)
                while waiting and nbytes + sum(count for count, _ in waiting) > _IN_FLIGHT_BYTES:
                    write_next()
                waiting.append((nbytes, pool.submit(convert, module, stored)))
                if len(waiting) > THREADS:
                    write_next()
            while waiting:
                write_next()
        finally:
            for _, unfinished in waiting:
                unfinished.cancel()
        return error

    def _stored(self, module: str, groups: dict[str, list[str]]) -> Stored:
        return {name.rpartition(".")[2]: self.reader.get(name, check=False) for name in groups[module]}

    def _stream_rows(self, module: str, sink: LayerSink) -> None:
        """Embedding and head, a few rows at a time: whole they are the largest tensors of all."""
        source = f"{module}.weight"
        name = source if self.layout.target == "cuda" else source.removeprefix("model.")
        tensor = sink.planned[name]
        rows = tensor.shape[0]
        share = rows // tensor.parts if tensor.dim == 0 else rows
        step = max(1, _ROWS_BYTES // (tensor.shape[1] * tensor.dtype.itemsize))
        for first in range(0, rows, share):
            holder = first // share if tensor.dim == 0 else None
            for start in range(first, first + share, step):
                chunk = self.reader.get_slice(source, slice(start, min(start + step, first + share)))
                sink.add_rows(tensor, chunk.to(tensor.dtype), holder)
                self.on_bytes(chunk.nbytes)
