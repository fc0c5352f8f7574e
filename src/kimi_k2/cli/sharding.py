"""What `convert` and `inspect --tp` share: the layout that their options ask for, and its plan as a table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from kimi_k2.cli.options import Decode, Target
from kimi_k2.terminal import say

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.sharding.layout import Layout


def make_layout(
    tp: int | None,
    ep: int | None,
    target: Target,
    experts: str | None,
    spmd_rank: bool | None = None,
    decode: Decode | None = None,
) -> Layout:
    """The layout of the options; the experts' format is by default what the target runs best."""
    from kimi_k2.sharding.layout import Layout

    best = "stored" if target == "cuda" else "tiles" if decode == "layers" else "blockwise"
    if target == "neuron" and experts in ("tiles", "bf16_tiles"):
        decode = decode or "layers"
    tp, ep = (32, ep or 2) if tp is None else (tp, ep or 1)  # of trn2-tp32-ep2
    return Layout(tp, ep, target, experts or best, spmd_rank=spmd_rank, decode=decode)


def print_sharding(config: KimiK2Config, layout: Layout, layer: int, as_json: bool) -> None:
    """Which slice of which tensor goes to which rank, after checking that all elements are covered."""
    from rich.table import Table

    from kimi_k2.sharding.plan import make_plan
    from kimi_k2.terminal import new_console

    plan = make_plan(config, layout)
    plan.check()
    rows = [
        (t.name, str(t.dtype).removeprefix("torch."), list(t.shape), t.kind, list(t.local_shape)) for t in plan.tensors
    ]
    if as_json:
        names = ("name", "dtype", "shape", "cut", "rank_shape")
        say(json.dumps([dict(zip(names, row, strict=True)) for row in rows]))
        return
    table = Table("tensor", "dtype", "shape", "cut", "on a rank")
    for tensor, row in zip(plan.tensors, rows, strict=True):
        if tensor.layer == layer:
            table.add_row(*(str(cell) for cell in row))
    new_console(table=True).print(table)
