"""`kimi-k2 inspect`."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k2.cli.options import Checkpoint, ExpertsOption, TargetOption

if TYPE_CHECKING:
    from kimi_k2.checkpoint.reader import CheckpointReader
    from kimi_k2.config import KimiK2Config


def inspect(
    checkpoint: Checkpoint,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor with its shard.")] = False,
    tp: Annotated[int | None, typer.Option(min=1, help="Show how `convert --tp` would cut it instead.")] = None,
    ep: Annotated[int, typer.Option(min=1, help="With --tp: groups that the experts are divided among.")] = 1,
    target: TargetOption = "neuron",
    experts: ExpertsOption = None,
    layer: Annotated[int, typer.Option(help="With --tp: the layer; -1 for embedding, norm and head.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="With --tp: all layers, as JSON.")] = False,
) -> None:
    """Check a checkpoint's headers against its config.json and show what it holds, without reading weights.

    With --tp: which slice of which tensor goes to which rank; a published model's name will do for that.
    """
    from kimi_k2.checkpoint.reader import CheckpointReader
    from kimi_k2.config import KimiK2Config

    if tp is not None:
        from kimi_k2.cli.sharding import make_layout, print_sharding

        print_sharding(KimiK2Config.load(checkpoint), make_layout(tp, ep, target, experts), layer, as_json)
        return
    config = KimiK2Config.from_pretrained(checkpoint)
    reader = CheckpointReader.for_config(checkpoint, config)
    _print_contents(checkpoint, config, reader, tensors)


def _print_contents(checkpoint: Path, config: KimiK2Config, reader: CheckpointReader, tensors: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if tensors:
        table = Table("tensor", "dtype", "shape", "MB", "shard")
        for name in reader.names():
            stored = reader.tensors[name]
            shape = "x".join(map(str, stored.shape))
            table.add_row(
                name, str(stored.dtype).removeprefix("torch."), shape, f"{stored.nbytes / 1e6:.3f}", stored.shard
            )
        console.print(table)
    sizes: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name, stored in reader.tensors.items():
        count, size = sizes[_category(name)]
        sizes[_category(name)] = (count + 1, size + stored.nbytes)
    summary = Table("part", "tensors", "GB", title=f"{checkpoint} ({len(reader.index.shards)} shards)")
    for category, (count, size) in sizes.items():
        summary.add_row(category, f"{count:,}", f"{size / 1e9:.3f}")
    summary.add_row("all", f"{len(reader.tensors):,}", f"{reader.total_bytes / 1e9:.3f}", style="bold")
    console.print(summary)
    quantization = config.quantization.method if config.quantization else "none"
    console.print(
        f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, {config.n_routed_experts} experts top-"
        f"{config.num_experts_per_tok}, cache {config.cache_dim} values a token a layer, quantization {quantization}"
    )


def _category(name: str) -> str:
    from kimi_k2.checkpoint.names import EXPERT

    if EXPERT.match(name):
        return "routed experts"
    for part, category in (
        ("self_attn", "attention"),
        ("shared_experts", "shared experts"),
        ("mlp.gate.", "router"),
        ("mlp.", "dense MLP"),
        ("norm", "norms"),
    ):
        if part in name:
            return category
    return "embedding and lm_head"
