"""`kimi-k2 bench`: the sweep over lengths and batch sizes, and the benchmarks of single parts."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

from kimi_k2.cli.command import Command
from kimi_k2.cli.commands.bench.parts import drafts, experts, kernels
from kimi_k2.cli.commands.bench.sweep import sweep


class _SweepByDefault(TyperGroup):
    """`kimi-k2 bench CHECKPOINT ...` is `kimi-k2 bench sweep CHECKPOINT ...`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        completing = ctx.resilient_parsing and not args
        if not completing and (not args or args[0] not in {*self.commands, "--help", "-h"}):
            args = ["sweep", *args]
        return super().parse_args(ctx, args)


bench = typer.Typer(
    name="bench",
    cls=_SweepByDefault,
    help="Time prefill and decode (`sweep`, the default), or single parts of the package.",
)
for _part in (sweep, kernels, experts, drafts):
    bench.command()(_part)


COMMAND = Command(
    "bench",
    bench,
    "Measure and prove",
    (
        "kimi-k2 bench /models/Kimi-K2-Thinking --backend cuda --batch-sizes 1,16 --prompt-lengths 1024 --out bench",
        "kimi-k2 bench kernels --only mla,gate",
    ),
)
