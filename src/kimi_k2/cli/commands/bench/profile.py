"""`kimi-k2 bench profile`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kimi_k2.cli.options import (
    DEFAULT_MODEL,
    BatchInvariant,
    Configuration,
    KvCacheDtype,
    Natural,
    OptionalCount,
    with_groups,
)
from kimi_k2.terminal import say


@dataclass(frozen=True)
class Step:
    """What is timed.

    Attributes:
        stand_in: One GPU as rank 0 of the deployment; nothing is sent.
        contexts: Cached tokens of each sequence, as 63x1024,65536; the preset's if not given.
        routing: uniform, same, or zipf:EXPONENT: how tokens choose experts, drawn.
        launches: Print the chosen kernels and what one step launches, by time.
        layers: Fewer layers than the model has; the total is then extrapolated.
        prompt_length: Tokens of the prefill that TTFT is of; 0 for none.
    """

    layers: OptionalCount = None
    stand_in: bool = False
    contexts: str | None = None
    kv_cache_dtype: KvCacheDtype = "auto"
    batch_invariant: BatchInvariant = False
    prompt_length: Natural = 1024
    routing: str | None = None
    launches: bool = False


@with_groups
def profile(
    preset: Annotated[str, typer.Option(help="A GPU deployment: a file of configs/, or its name.")],
    step: Step,
    model: Configuration = DEFAULT_MODEL,
    weights: Annotated[Path | None, typer.Option(help="Output of `convert --target cuda`; else synthetic.")] = None,
) -> None:
    """Time a decode step and a prefill on one GPU or, under torchrun, on several: TPOT, TTFT, and each part."""
    from kimi_k2.bench.kernels.profile import Job
    from kimi_k2.bench.kernels.profile import profile as measure
    from kimi_k2.bench.kernels.routing import Routing
    from kimi_k2.config import KimiK2Config
    from kimi_k2.engine.device import check_device
    from kimi_k2.ops import registry
    from kimi_k2.plan.deployment import Deployment

    check_device("cuda")
    config, deployment = KimiK2Config.load(model), Deployment.load(preset)
    if deployment.hardware.target != "cuda":
        raise typer.BadParameter(f"{preset} is for {deployment.instance}, expected one for GPUs", param_hint="--preset")
    even = (deployment.seq_len,) * deployment.batch_size
    job = Job(
        contexts=_lengths(step.contexts) if step.contexts else even,
        prompt=step.prompt_length,
        layers=step.layers,
        weights=weights,
        stand_in=step.stand_in,
        kv_cache=step.kv_cache_dtype,
        batch_invariant=step.batch_invariant,
        launches=step.launches,
        routing=None if step.routing is None else Routing.parse(step.routing),
    )
    lines = measure(config, deployment.layout(config), job)
    if lines:
        say("\n".join(lines))
        if step.launches:
            say(registry.explain(step.batch_invariant))


def _lengths(text: str) -> tuple[int, ...]:
    """`63x1024,65536` as 64 numbers."""
    lengths: list[int] = []
    for item in text.split(","):
        count, _, length = item.rpartition("x")
        if not length.isdecimal() or not (count or "1").isdecimal() or int(length) < 1 or int(count or 1) < 1:
            raise typer.BadParameter(f"{item!r}: expected LENGTH or COUNTxLENGTH", param_hint="--contexts")
        lengths += [int(length)] * int(count or 1)
    return tuple(lengths)
