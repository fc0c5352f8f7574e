"""Convert a checkpoint to one file a rank: streamed, in bounded memory, resumable at layers.

Every rank's file is preallocated. A layer's parts are converted one expert at a time, cut by the plan and written to
their places. When a layer is whole on the disk its checksums are appended to a journal; a rerun starts with the layers
that the journal lacks and overwrites what was half written, so the result has the same bytes as an unbroken run.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.checkpoint.writer import write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.stored import Stored
from kimi_k2.sharding.convert import Converter, Part, Unit, modules_by_layer, units
from kimi_k2.sharding.errors import ConversionError
from kimi_k2.sharding.layer_sink import LayerSink
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.manifest import MANIFEST, WEIGHTS, describe, rank_file_name
from kimi_k2.sharding.plan import make_plan
from kimi_k2.sharding.planned import PlannedTensor, ShardingPlan
from kimi_k2.sharding.rank_file import RankFile

JOURNAL = "journal.jsonl"
# Each holds an expert: 90 MB at the real sizes.
THREADS = min(os.cpu_count() or 1, 8)
_VOCABULARY = ("model.embed_tokens", "lm_head")
_ROWS_BYTES = 2**25


class Presharder:
    """One conversion.

    Args:
        source: checkpoint directory.
        output: directory to write; with an unfinished conversion of the same source and options it is resumed.
        layout: ranks and formats.
        report: measure the conversion error of the routed experts.
        allow_nonfinite: convert NaN, Inf and impossible scales too, whatever comes of them.
        on_bytes: called with the bytes of input as they are done.
        on_layer: called with a layer's number and its error (None for a layer without converted experts).

    Raises:
        ConfigError: sizes do not divide, or `output` holds something else.
        CheckpointError: the source is damaged, or the disk is full (from `run`, too).
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
        on_bytes: Callable[[int], None] = lambda _: None,
        on_layer: Callable[[int, ConversionError | None], None] = lambda *_: None,
    ) -> None:
        self.output = Path(output)
        self.config = KimiK2Config.from_pretrained(source)
        self.reader = CheckpointReader.for_config(source, self.config, allow_nonfinite=allow_nonfinite)
        self.plan: ShardingPlan = make_plan(self.config, layout)
        self.plan.check()
        self.layout, self.report = layout, report
        self.on_bytes, self.on_layer = on_bytes, on_layer
        self.made_from = {
            **describe(self.reader, self.config, layout),
            "report": report,
            "allow_nonfinite": allow_nonfinite,
        }
        self.errors: dict[int, dict[str, float]] = {}
        self.checksums: list[dict[str, str]] = [{} for _ in range(layout.ranks)]
        self._ranks: list[RankFile] = []
        self._modules = modules_by_layer(self.reader.names())

    def run(self) -> dict[str, Any]:
        """Convert what is not yet converted; returns the manifest."""
        if (self.output / MANIFEST).exists():
            manifest = dict(json.loads((self.output / MANIFEST).read_text(encoding="utf-8")))
            if manifest.get("made_from") != self.made_from:
                raise ConfigError("holds a conversion of another source or other options", file=self.output)
            (self.output / JOURNAL).unlink(missing_ok=True)  # a run may have died between the two
            return manifest
        weights = self.output / WEIGHTS
        journal = self.output / JOURNAL
        weights.mkdir(parents=True, exist_ok=True)
        done = self._read_journal(journal)
        resume = done is not None
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # experts are converted in parallel; a pool in each of them would only contend
        try:
            for rank in range(self.layout.ranks):
                specs = [tensor.spec() for tensor in self.plan.tensors]
                self._ranks.append(RankFile(weights / rank_file_name(rank), specs, resume=resume))
            if done is None:
                done = set()
                self._append(journal, {"made_from": self.made_from}, new=True)
            with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(1) as flusher:
                flushing: Future[None] | None = None
                for layer in self._modules:
                    nbytes = sum(self.reader.tensors[n].nbytes for g in self._modules[layer].values() for n in g)
                    if layer in done:
                        self.on_bytes(nbytes)
                        continue
                    checksums, error = self._layer(layer, pool)
                    # A layer goes to the disk while the next one is converted; never more than one.
                    if flushing is not None:
                        flushing.result()
                    flushing = flusher.submit(self._flush, layer, checksums, error, journal)
                if flushing is not None:
                    flushing.result()
            for file in self._ranks:
                file.finish()
        finally:
            torch.set_num_threads(threads)
            for file in self._ranks:
                file.close()
        return self._write_manifest(journal)

    # -- resuming ------------------------------------------------------------------------------------

    def _read_journal(self, path: Path) -> set[int] | None:
        """Layers finished by an earlier run, None if there was none; their checksums and errors are taken over."""
        if not path.exists():
            if any((self.output / WEIGHTS).glob("*.safetensors")):
                raise ConfigError("holds files of something else; give an empty directory", file=self.output)
            return None
        lines = path.read_bytes().split(b"\n")
        complete = lines[:-1]  # a line cut off by a kill has no newline
        if not complete:
            return None
        entries = [json.loads(line) for line in complete]
        if entries[0]["made_from"] != self.made_from:
            raise ConfigError("an unfinished conversion of another source or other options lies here", file=path)
        if lines[-1]:
            os.truncate(path, sum(len(line) + 1 for line in complete))
        for entry in entries[1:]:
            for own, saved in zip(self.checksums, entry["checksums"], strict=True):
                own.update(saved)
            if entry["error"] is not None:
                self.errors[entry["layer"]] = entry["error"]
        return {entry["layer"] for entry in entries[1:]}

    def _append(self, path: Path, entry: dict[str, Any], *, new: bool = False) -> None:
        with path.open("wb" if new else "ab") as file:
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _write_manifest(self, journal: Path) -> dict[str, Any]:
        total = ConversionError()
        for layer in sorted(self.errors):
            sums = {name: value for name, value in self.errors[layer].items() if name != "relative_l2"}
            total.add(ConversionError(**sums))  # type: ignore[arg-type]
        layers = {str(layer): self.errors[layer] for layer in sorted(self.errors)}
        manifest = {
            "made_from": self.made_from,
            "files": {rank_file_name(rank): file.nbytes for rank, file in enumerate(self._ranks)},
            "errors": {"layers": layers, "total": total.as_dict()},
            "checksum": "sha256",
            "checksums": {rank_file_name(rank): dict(sorted(sums.items())) for rank, sums in enumerate(self.checksums)},
        }
        write_json(self.output / MANIFEST, manifest)
        journal.unlink()
        return manifest

    # -- one layer -----------------------------------------------------------------------------------

    def _layer(self, layer: int, pool: ThreadPoolExecutor) -> tuple[list[dict[str, str]], ConversionError]:
        groups = self._modules[layer]
        planned = {tensor.name: tensor for tensor in self.plan.layer(layer)}
        sink = LayerSink(planned, self._ranks, THREADS)
        converter = Converter(self.config, self.layout, planned, report=self.report)
        error = ConversionError()
        for part in self._rank_numbers(layer):
            sink.write([part], pool)
        waiting: deque[tuple[int, Future[tuple[list[Part], ConversionError]]]] = deque()

        def write_next() -> None:
            nbytes, converted = waiting.popleft()
            parts, part_error = converted.result()
            sink.add(parts, pool)
            error.add(part_error)
            self.on_bytes(nbytes)

        try:
            for unit in units(groups, self.layout):
                if unit.modules[0] in _VOCABULARY:
                    self._stream_rows(unit.modules[0], planned, sink, pool)
                    continue
                stored = self._read(unit, groups)
                nbytes = sum(tensor.nbytes for one in stored.values() for tensor in one.values())
                waiting.append((nbytes, pool.submit(self._convert, converter, unit, stored)))
                if len(waiting) > THREADS:
                    write_next()
            while waiting:
                write_next()
        finally:
            for _, unfinished in waiting:
                unfinished.cancel()
        return sink.finish(pool), error

    def _flush(self, layer: int, checksums: list[dict[str, str]], error: ConversionError, journal: Path) -> None:
        """Make a layer durable, then say so in the journal."""
        for file in self._ranks:
            file.sync()
        for own, new in zip(self.checksums, checksums, strict=True):
            own.update(new)
        measured = error if error.values else None
        if measured:
            self.errors[layer] = measured.as_dict()
        self._append(journal, {"layer": layer, "error": measured and measured.as_dict(), "checksums": checksums})
        self.on_layer(layer, measured)

    def _read(self, unit: Unit, groups: dict[str, list[str]]) -> dict[str, Stored]:
        return {
            module: {name.rpartition(".")[2]: self.reader.get(name, check=False) for name in groups[module]}
            for module in unit.modules
        }

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
