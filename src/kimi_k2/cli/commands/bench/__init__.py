"""`kimi-k2 bench`: the sweep over lengths and batch sizes, and the benchmarks of single parts."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

from kimi_k2.cli.command import Command
from kimi_k2.cli.commands.bench.parts import experts, kernels, tools, tune
from kimi_k2.cli.commands.bench.profile import profile
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
    help="Time prefill and decode (`sweep`, the default), a GPU's step or single parts; check tool calls.",
)
for _command in (sweep, profile, kernels, experts, tune, tools):
    bench.command()(_command)


COMMAND = Command(
    "bench",
    bench,
    "Measure and prove",
    (
        "kimi-k2 bench /models/Kimi-K2-Thinking --backend cuda --batch-sizes 1,16 --prompt-lengths 1024 --out bench",
        "kimi-k2 bench kernels --only mla,gate",
        "kimi-k2 bench profile --preset h200-tp8 --stand-in --layers 12 --contexts 16x1024 --routing uniform",
        "torchrun --nproc-per-node 8 --no-python kimi-k2 bench profile --preset h200-tp8 --weights /ranks",
        "kimi-k2 bench tune kimi-k2-thinking --shape TP8,EP8 --tokens 1,16,64 --out tuned",
        "kimi-k2 bench tools http://localhost:8000/v1 requests.jsonl --out tools",
    ),
)
