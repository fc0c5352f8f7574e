"""`kimi-k2 inspect`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.options import Checkpoint, Download, refuse
from kimi_k2.files import Json
from kimi_k2.terminal import say

if TYPE_CHECKING:
    from kimi_k2.checkpoint.reader import CheckpointReader
    from kimi_k2.config import KimiK2Config


def inspect(
    context: typer.Context,
    checkpoint: Checkpoint,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor with its shard.")] = False,
    preset: Annotated[str | None, typer.Option(help="Show how `convert --preset` would cut it instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; with --preset of all layers.")] = False,
    download: Download = False,
) -> None:
    """Check a checkpoint's headers against its config.json and show what it holds, without reading weights.

    Of the output of `convert`: what it was made from and for how many ranks; `verify` reads its files.

    With --preset: which slice of which tensor goes to which rank; a published model's name will do for that.
    """
    from kimi_k2.checkpoint.hub import resolve_checkpoint
    from kimi_k2.checkpoint.reader import CheckpointReader
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.manifest import MANIFEST

    directory = resolve_checkpoint(checkpoint, download=download)
    if (directory / MANIFEST).is_file() and not (directory / "config.json").exists():
        refuse(context, "of a checkpoint; here is the output of `convert`", but=("checkpoint", "as_json", "download"))
        _print_ranks(directory, as_json)
        return
    if preset is not None:
        refuse(context, "lists the checkpoint's own tensors: without --preset", "tensors")
        config = KimiK2Config.load(directory)
        _print_sharding(config, preset, as_json)
        return
    config = KimiK2Config.from_pretrained(directory)
    reader = CheckpointReader.for_config(directory, config, vision=True)
    if as_json:
        say(json.dumps(_contents(directory, config, reader, tensors), indent=1))
    else:
        _print_contents(directory, config, reader, tensors)


def _print_sharding(config: KimiK2Config, preset: str, as_json: bool) -> None:
    """Which slice of which tensor goes to which rank.

    As a table of the ends, a dense layer and one with experts, which stand for all.
    """
    from rich.table import Table

    from kimi_k2.plan.deployment import Deployment
    from kimi_k2.sharding.layout import GLOBAL_LAYER
    from kimi_k2.sharding.plan import make_plan
    from kimi_k2.terminal import new_console

    plan = make_plan(config, Deployment.load(preset).layout(config))
    names = ("name", "dtype", "shape", "cut", "rank_shape")
    rows = [
        (t.name, str(t.dtype).removeprefix("torch."), list(t.shape), t.kind, list(t.local_shape)) for t in plan.tensors
    ]
    if as_json:
        say(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
        return
    table = Table("tensor", "dtype", "shape", "cut", "on a rank")
    kinds = {config.is_moe_layer(layer): layer for layer in reversed(range(config.num_hidden_layers))}
    for tensor, row in zip(plan.tensors, rows, strict=True):
        if tensor.layer in (GLOBAL_LAYER, *kinds.values()):
            table.add_row(*(str(cell) for cell in row))
    new_console(table=True).print(table)


def _print_ranks(directory: Path, as_json: bool) -> None:
    """What the manifest of a conversion says."""
    from kimi_k2.sharding.manifest import load_manifest

    manifest = load_manifest(directory)
    if as_json:
        say(json.dumps(manifest, indent=1))
        return
    origin = manifest["made_from"]
    sizes, options = manifest["files"].values(), origin["options"]
    say(f"{directory}: output of `convert`, {len(sizes)} files, {sum(sizes) / 1e9:.3f} GB")
    say(", ".join(f"{name} {value}" for name, value in options.items()))
    say(f"made from {len(origin['source']['shards'])} shards; `kimi-k2 verify {directory}` reads the files again")


def _sizes(reader: CheckpointReader) -> dict[str, tuple[int, int]]:
    """Tensors and bytes, by what `plan` counts them as."""
    from kimi_k2.checkpoint.names import VISION
    from kimi_k2.plan.memory import TOWER, category

    sizes: dict[str, tuple[int, int]] = {}
    for name, stored in reader.tensors.items():
        kind = TOWER if VISION.match(name) else category(name)
        count, size = sizes.get(kind, (0, 0))
        sizes[kind] = (count + 1, size + stored.nbytes)
    return sizes


def _listed(reader: CheckpointReader) -> Iterator[Json]:
    for name in reader.names():
        stored = reader.tensors[name]
        dtype = str(stored.dtype).removeprefix("torch.")
        shape = list(stored.shape)
        yield {"name": name, "dtype": dtype, "shape": shape, "bytes": stored.nbytes, "shard": stored.shard}


def _quantization(config: KimiK2Config) -> str:
    quantization = config.quantization
    return "none" if quantization is None else f"{quantization.name} ({quantization.method})"


def _contents(directory: Path, config: KimiK2Config, reader: CheckpointReader, tensors: bool) -> Json:
    counted = {name: {"tensors": count, "bytes": size} for name, (count, size) in _sizes(reader).items()}
    fields = ("num_hidden_layers", "hidden_size", "n_routed_experts", "num_experts_per_tok", "max_position_embeddings")
    return {
        "checkpoint": str(directory),
        "shards": len(reader.index.shards),
        "tensors": len(reader.tensors),
        "names": reader.spelling,
        "bytes": reader.total_bytes,
        "parts": counted,
        "config": {field: getattr(config, field) for field in fields} | {"quantization": _quantization(config)},
        **({"tensor_list": list(_listed(reader))} if tensors else {}),
    }


def _print_contents(directory: Path, config: KimiK2Config, reader: CheckpointReader, tensors: bool) -> None:
    from rich.table import Column, Table

    from kimi_k2.terminal import new_console

    console = new_console(table=True)
    if tensors:
        table = Table(Column("tensor", overflow="fold"), "dtype", "shape", "MB", Column("shard", overflow="fold"))
        for row in _listed(reader):
            shape = "x".join(map(str, row["shape"]))
            table.add_row(row["name"], row["dtype"], shape, f"{row['bytes'] / 1e6:.3f}", row["shard"])
        console.print(table)
    summary = Table("part", "tensors", "GB", title=f"{directory} ({len(reader.index.shards)} shards)")
    for category, (count, size) in _sizes(reader).items():
        summary.add_row(category, f"{count:,}", f"{size / 1e9:.3f}")
    summary.add_row("all", f"{len(reader.tensors):,}", f"{reader.total_bytes / 1e9:.3f}", style="bold")
    console.print(summary)
    console.print(
        f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, {config.n_routed_experts} experts top-"
        f"{config.num_experts_per_tok}, cache {config.cache_dim} values a token a layer, quantization "
        f"{_quantization(config)}; names are {reader.spelling}"
    )


COMMAND = Command(
    "inspect",
    inspect,
    "Checkpoints",
    (
        "kimi-k2 inspect /models/Kimi-K2-Thinking --tensors",
        "kimi-k2 inspect /ranks",
        "kimi-k2 inspect kimi-k2-instruct-0905 --preset trn2-tp32-ep2",
    ),
)
