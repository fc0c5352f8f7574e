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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_k2.checkpoint.index import DTYPE_CODES
from kimi_k2.checkpoint.names import VISION
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.checkpoint.writer import SafetensorsWriter, tensor_bytes
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import CheckpointError, ConfigError
from kimi_k2.files import PARTIAL_SUFFIX, DirectoryLock
from kimi_k2.quantization.stored import Stored, TensorSpec
from kimi_k2.sharding.convert import Converter, Part, Unit, modules_by_layer, units
from kimi_k2.sharding.early_qkv_a import precedes_another, scaled_projections
from kimi_k2.sharding.errors import ConversionError
from kimi_k2.sharding.layer_sink import Flusher, LayerSink
from kimi_k2.sharding.layout import Layout, PlannedTensor, ShardingPlan
from kimi_k2.sharding.manifest import (
    JOURNAL,
    MANIFEST,
    VISION_FILE,
    WEIGHTS,
    FinishedLayer,
    Journal,
    checked_options,
    describe,
    load_manifest,
    rank_file_name,
    vision_layout,
    write_manifest,
)
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.rank_file import CHECKSUM, FIRST_CHECKSUM, RESUME, FileLayout, RankFile, digest_maker
from kimi_k2.sharding.source import check_same, check_unchanged, identify

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
        verify_output: compare what is there of a finished conversion with its checksums, and make again what differs.
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
        verify_output: bool = False,
        on_bytes: Callable[[int], None] = lambda _: None,
        on_layer: Callable[[int, ConversionError | None], None] = lambda *_: None,
    ) -> None:
        self.output = Path(output)
        self.config = KimiK2Config.from_pretrained(source)
        self.reader = CheckpointReader.for_config(source, self.config, vision=True, allow_nonfinite=allow_nonfinite)
        self.plan: ShardingPlan = make_plan(self.config, layout)
        self.plan.check()
        self.layout, self.report, self.verify_source = layout, report, verify_source
        self.verify_output, self.looked_through = verify_output, False
        self.on_bytes, self.on_layer = on_bytes, on_layer
        self._source = identify(self.reader, hash_bytes=verify_source)
        described = describe(self.config, layout, self._source)
        self.made_from = {**described, "report": report, "allow_nonfinite": allow_nonfinite}
        self.errors: dict[int, dict[str, float]] = {}
        self.checksums: list[dict[str, str]] = [{} for _ in range(layout.ranks)]
        self._journal = Journal(self.output / JOURNAL)
        # An earlier run may have begun with another kind of checksum; then all of them are of that kind.
        self._checksum, self._digest = CHECKSUM, digest_maker(CHECKSUM, self.output)
        self._file = FileLayout.of(tensor.spec() for tensor in self.plan.tensors)
        self._ranks: list[RankFile] = []
        self._trusted: set[int] = set()  # ranks whose files were finished by an earlier run and are not read again
        self._modules = modules_by_layer(name for name in self.reader.names() if not VISION.match(name))

    def run(self) -> dict[str, Any]:
        """Convert what is not yet converted; returns the manifest."""
        weights = self.output / WEIGHTS
        try:
            weights.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot be made: {error.strerror}", file=weights) from None
        with DirectoryLock(self.output):
            finished = (self.output / MANIFEST).exists()
            done = self._earlier(weights)
            if finished and not self.verify_output and self._is_whole(weights):
                self.looked_through = True
                self._journal.remove()  # a run may have died between the two
                return load_manifest(self.output)
            self._check_space(weights)
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # experts are converted in parallel; a pool in each of them would only contend
            try:
                self._open_ranks(weights, resume=done is not None)
                if finished and not self.verify_output:
                    self._trusted = {rank for rank, file in enumerate(self._ranks) if file.finished}
                if done is None:
                    self._journal.begin(self.made_from, self._checksum)
                self._convert_all(done or {}, repair=finished)
            finally:
                torch.set_num_threads(threads)
                for file in self._ranks:
                    file.close()
            tower = self._write_vision()
            self._check_source(self._source)
            manifest = write_manifest(
                self.output, self.made_from, self.plan, self.errors, self.checksums, self._checksum, tower
            )
            self._journal.remove()
            return manifest

    def _write_vision(self) -> dict[str, Any] | None:
        """Copy tower and projector as they are stored: the manifest's entry; None if the model has none."""
        if self.config.vision is None:
            return None
        names = [name for name in self.reader.names() if VISION.match(name)]
        specs = [TensorSpec(name, self.reader.tensors[name].dtype, self.reader.tensors[name].shape) for name in names]
        sums = {}
        with SafetensorsWriter(self.output / VISION_FILE, specs) as writer:
            for spec in specs:
                tensor = self.reader.get(spec.name)
                writer.write(spec.name, tensor)
                checksum = self._digest()
                checksum.update(tensor_bytes(tensor))
                sums[spec.name] = checksum.hexdigest()
                self.on_bytes(spec.nbytes)
        return {
            "file": VISION_FILE,
            "bytes": FileLayout.of(specs).nbytes,
            "tensors": {spec.name: {"dtype": DTYPE_CODES[spec.dtype], "shape": list(spec.shape)} for spec in specs},
            "checksums": dict(sorted(sums.items())),
        }

    def _check_space(self, weights: Path) -> None:
        """Compare what the files need with what is free, before the first of them is made.

        Raises:
            CheckpointError: it is not there.
        """
        try:
            free, needed = shutil.disk_usage(weights).free, 0
            for rank in range(self.layout.ranks):
                path = weights / rank_file_name(rank)
                there = next((one for one in (path.with_name(path.name + PARTIAL_SUFFIX), path) if one.exists()), None)
                needed += max(0, self._file.nbytes - (there.stat().st_blocks * 512 if there else 0))
        except OSError:
            return  # a file system that does not say; the reservations will tell
        needed += sum(one.nbytes for name, one in self.reader.tensors.items() if VISION.match(name))
        if needed > free:
            raise CheckpointError(
                f"the conversion needs {needed:,} bytes more, {free:,} are free; {RESUME}", file=weights
            )

    def _open_ranks(self, weights: Path, *, resume: bool) -> None:
        """All files, with their space reserved; what was reserved is given back where one cannot be."""
        try:
            for rank in range(self.layout.ranks):
                self._ranks.append(RankFile(weights / rank_file_name(rank), self._file, resume=resume))
        except CheckpointError:
            for file in self._ranks:
                file.close(discard=True)
            self._ranks.clear()
            raise

    def _convert_all(self, done: dict[int, FinishedLayer], *, repair: bool) -> None:
        with ThreadPoolExecutor(THREADS) as pool, Flusher(self._ranks) as flusher:
            for layer in self._modules:
                wanted: Sequence[int] = range(self.layout.ranks)
                if layer in done:
                    wanted = self._damaged(done[layer], pool)
                if not wanted:
                    self.on_bytes(self._layer_bytes(layer))
                    continue
                checksums, error = self._layer(layer, wanted, pool, flusher)
                flusher.wait()
                made = FinishedLayer(layer, error.as_dict() if error.values else None, self._merged(layer, checksums))
                if repair and made.checksums != done[layer].checksums:
                    raise CheckpointError(
                        f"layer {layer} does not come out as the manifest says", file=self.output / MANIFEST
                    )
                flusher.end_layer(partial(self._durable, made, error, journal=not repair))
            flusher.wait()
        for file in self._ranks:
            file.finish()

    def _layer_bytes(self, layer: int) -> int:
        return sum(self.reader.tensors[name].nbytes for names in self._modules[layer].values() for name in names)

    def _merged(self, layer: int, made: dict[int, dict[str, str]]) -> list[dict[str, str]]:
        """Checksums of a layer by rank: those made now, and those of ranks that had it already."""
        for rank, sums in made.items():
            self.checksums[rank].update(sums)
        names = [tensor.name for tensor in self.plan.layer(layer)]
        return [{name: sums[name] for name in names} for sums in self.checksums]

    # -- resuming ------------------------------------------------------------------------------------

    def _earlier(self, weights: Path) -> dict[int, FinishedLayer] | None:
        """Layers that an earlier run finished, None if there was none; their checksums and errors are taken over."""
        if (self.output / MANIFEST).exists():
            manifest = load_manifest(self.output)
            made_from, finished = manifest["made_from"], self._layers_of(manifest)
            self._checksum = manifest.get("checksum", FIRST_CHECKSUM)
            self._check_made_from(made_from, self.output / MANIFEST, "holds a conversion")
        else:
            read = self._journal.read()
            if read is None:
                if any(weights.glob("*.safetensors")):
                    raise ConfigError("holds files of something else; give an empty directory", file=self.output)
                return None
            made_from, self._checksum, finished = read
            self._check_made_from(made_from, self._journal.path, "an unfinished conversion")
        self.made_from = made_from
        self._digest = digest_maker(self._checksum, self.output)
        whole = {}
        for layer in finished:
            names = {tensor.name for tensor in self.plan.layer(layer.layer)}
            if len(layer.checksums) != self.layout.ranks or any(set(sums) != names for sums in layer.checksums):
                continue  # damaged: as if it were not there
            whole[layer.layer] = layer
            for own, sums in zip(self.checksums, layer.checksums, strict=True):
                own.update(sums)
            if layer.error is not None:
                self.errors[layer.layer] = layer.error
        return whole

    def _layers_of(self, manifest: dict[str, Any]) -> list[FinishedLayer]:
        """A finished conversion as the lines of its journal."""
        errors = manifest["errors"]["layers"]
        files = [manifest["checksums"].get(rank_file_name(rank), {}) for rank in range(self.layout.ranks)]
        layers = {layer: {tensor.name for tensor in self.plan.layer(layer)} for layer in self._modules}
        return [
            FinishedLayer(
                layer,
                errors.get(str(layer)),
                [{name: digest for name, digest in sums.items() if name in names} for sums in files],
            )
            for layer, names in layers.items()
        ]

    def _check_made_from(self, recorded: dict[str, Any], file: Path, what: str) -> None:
        """Refuse another source or other options.

        Raises:
            ConfigError: they differ.
        """

        def without_files(made_from: dict[str, Any]) -> dict[str, Any]:
            options = checked_options(made_from["options"], file)
            return {**made_from, "options": options, "source": {**made_from["source"], "shards": None}}

        old, new = without_files(recorded), without_files(self.made_from)
        if old != new:
            changed = [
                f"{name} {value}, now {new['options'].get(name)}"
                for name, value in old["options"].items()
                if value != new["options"].get(name)
            ]
            raise ConfigError(
                f"{what} of another source or other options ({'; '.join(changed) or 'source'})", file=file
            )
        check_same(recorded["source"]["shards"], self.made_from["source"]["shards"], file)

    def _is_whole(self, weights: Path) -> bool:
        """Whether every rank's file is there with its size and header."""
        tower = load_manifest(self.output).get("vision") if self.config.vision is not None else None
        if tower is not None and not vision_layout(tower).is_whole(self.output / VISION_FILE):
            return False
        return all(self._file.is_whole(weights / rank_file_name(rank)) for rank in range(self.layout.ranks))

    def _damaged(self, layer: FinishedLayer, pool: ThreadPoolExecutor) -> list[int]:
        """Ranks that do not hold a layer as its checksums say."""

        def is_damaged(rank: int) -> bool:
            file = self._ranks[rank]
            if file.fresh:
                return True
            return any(file.checksum(name, self._digest) != digest for name, digest in layer.checksums[rank].items())

        ranks = [rank for rank in range(self.layout.ranks) if rank not in self._trusted]
        return [rank for rank, damaged in zip(ranks, pool.map(is_damaged, ranks), strict=True) if damaged]

    def _check_source(self, shards: Iterable[str]) -> None:
        """Nothing may have been written to shards of the source while they were read.

        Raises:
            CheckpointError: naming the first that was.
        """
        check_unchanged(self.reader.directory, {shard: self._source[shard] for shard in shards})

    def _durable(self, layer: FinishedLayer, error: ConversionError, *, journal: bool) -> None:
        """A layer is whole on the disk: say so in the journal."""
        names = (name for names in self._modules[layer.layer].values() for name in names)
        self._check_source({self.reader.tensors[name].shard for name in names})
        if layer.error is not None:
            self.errors[layer.layer] = layer.error
        if journal:
            self._journal.finish_layer(layer)
        self.on_layer(layer.layer, error if error.values else None)

    # -- one layer -----------------------------------------------------------------------------------

    def _layer(
        self, layer: int, wanted: Sequence[int], pool: ThreadPoolExecutor, flusher: Flusher
    ) -> tuple[dict[int, dict[str, str]], ConversionError]:
        """Convert a layer for the wanted ranks: checksums by rank and name, and the error of all of it."""
        groups = self._modules[layer]
        planned = {tensor.name: tensor for tensor in self.plan.layer(layer)}
        sink = LayerSink(planned, self._ranks, wanted, THREADS, self._digest)
        converter = Converter(self.config, self.layout, planned, report=self.report, following=self._following(layer))
        error = ConversionError()
        for part in self._rank_numbers(layer):
            sink.write([part], pool)
        waiting: deque[tuple[int, Future[tuple[list[Part], ConversionError]]]] = deque()

        def write_next() -> None:
            nbytes, converted = waiting.popleft()
            parts, part_error = converted.result()
            sink.add(parts, pool)
            error.add(part_error)
            flusher.wrote(nbytes)
            self.on_bytes(nbytes)

        try:
            for unit in units(groups, self.layout, shared=converter.holds_shared):
                if unit.modules[0] in _VOCABULARY:
                    self._stream_rows(unit.modules[0], planned, sink, pool)
                    continue
                stored = self._read(unit, groups)
                nbytes = sum(tensor.nbytes for one in stored.values() for tensor in one.values())
                while waiting and nbytes + sum(count for count, _ in waiting) > _IN_FLIGHT_BYTES:
                    write_next()
                waiting.append((nbytes, pool.submit(self._convert, converter, unit, stored)))
                if len(waiting) > THREADS:
                    write_next()
            while waiting:
                write_next()
        finally:
            for _, unfinished in waiting:
                unfinished.cancel()
        return sink.finish(pool), error

    def _following(self, layer: int) -> Tensor | None:
        """What early down projections fold of the layer behind; None without them, or where there is none."""
        if not self.layout.layers or not precedes_another(self.config, layer):
            return None
        groups = self._modules[layer + 1]
        return scaled_projections(self.config, layer + 1, lambda module: self._stored(module, groups))

    def _stored(self, module: str, groups: dict[str, list[str]]) -> Stored:
        return {name.rpartition(".")[2]: self.reader.get(name, check=False) for name in groups[module]}

    def _read(self, unit: Unit, groups: dict[str, list[str]]) -> dict[str, Stored]:
        return {module: self._stored(module, groups) for module in unit.modules}

    def _convert(
        self, converter: Converter, unit: Unit, stored: dict[str, Stored]
    ) -> tuple[list[Part], ConversionError]:
        for module, tensors in stored.items():
            self.reader.check_module(module, tensors)
        return converter.convert(unit, stored)

    def _stream_rows(
        self, module: str, planned: dict[str, PlannedTensor], sink: LayerSink, pool: ThreadPoolExecutor
    ) -> None:
        """Embedding and head, a few rows at a time: whole they are the largest tensors of all."""
        source = f"{module}.weight"
        name = source if self.layout.target == "cuda" else source.removeprefix("model.")
        tensor = planned[name]
        rows = tensor.shape[0]
        share = rows // tensor.parts if tensor.dim == 0 else rows
        step = max(1, _ROWS_BYTES // (tensor.shape[1] * tensor.dtype.itemsize))
        for first in range(0, rows, share):
            holder = first // share if tensor.dim == 0 else None
            for start in range(first, first + share, step):
                chunk = self.reader.get_slice(source, slice(start, min(start + step, first + share)))
                sink.write_rows(tensor, chunk.to(tensor.dtype), holder, pool)
                self.on_bytes(chunk.nbytes)

    def _rank_numbers(self, layer: int) -> Iterator[Part]:
        """NxD's rank tensors, which no checkpoint holds."""
        ranks, layout = torch.arange(self.layout.ranks, dtype=torch.int32), self.layout
        for tensor in self.plan.layer(layer):
            if tensor.name.endswith(".rank"):
                yield Part(tensor.name, None, ranks)
            elif tensor.name.endswith(".local_expert_indices"):
                local = tensor.shape[1]
                first = ranks.div(layout.moe_tp, rounding_mode="floor") * local
                yield Part(tensor.name, None, first[:, None] + torch.arange(local, dtype=torch.int32))
