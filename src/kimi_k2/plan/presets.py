"""All presets side by side: memory, bytes and modelled times of each, or why it cannot run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.plan.advice import advice
from kimi_k2.plan.cost import decode_counts, prefill_counts
from kimi_k2.plan.deployment import Deployment, preset_names
from kimi_k2.plan.instance import GIB
from kimi_k2.plan.memory import memory_plan
from kimi_k2.plan.roofline import roofline
from kimi_k2.plan.target import make_target
from kimi_k2.sharding.planned import ShardingPlan

LEADING = "trn2-tp32-ep2"
WIDTH = 165  # columns of the table


@dataclass(frozen=True)
class PresetRow:
    """One preset; sizes in bytes a rank, times in seconds (modelled, see `roofline`).

    Attributes:
        fits: whether what it needs is usable.
        why_not: one line, where it does not fit or the model's sizes do not divide among its ranks.
    """

    name: str
    layout: str
    experts: str
    batch: int
    context: int
    prompt: int
    fits: bool
    why_not: str = ""
    resident: int = 0
    scratch: int | None = None
    usable: int = 0
    decode_bytes: int = 0
    tpot: float = 0.0
    ttft: float = 0.0


def preset_rows(config: KimiK2Config) -> list[PresetRow]:
    """A row for each preset: Trainium's first, the leading one at the top, each layout's by batch and context."""

    def place(one: Deployment) -> tuple[object, ...]:
        family = one.hardware.target != "neuron", not one.name.startswith(LEADING), one.tp_degree
        return (*family, one.name != LEADING, one.batch_size, one.seq_len, one.name)

    plans: dict[object, ShardingPlan] = {}  # many share a layout
    return [_row(config, one, plans) for one in sorted(map(Deployment.load, preset_names()), key=place)]


def _row(config: KimiK2Config, preset: Deployment, plans: dict[object, ShardingPlan]) -> PresetRow:
    layout = f"TP{preset.moe_tp_degree} EP{preset.moe_ep_degree}"
    lengths = (preset.batch_size, preset.seq_len, preset.max_context_length)
    try:
        target = make_target(preset, config)
        key = target.layout, target.torch_native is None
        sharding = plans[key] = plans.get(key) or target.sharding(config)
        memory = memory_plan(config, target, sharding)
    except ConfigError as error:
        return PresetRow(preset.name, layout, preset.experts, *lengths, fits=False, why_not=str(error))
    decode = decode_counts(config, target, sharding)
    why = "" if memory.fits else f"{memory.verdict}; it would fit with {advice(config, target, memory)[0]}"
    return PresetRow(
        preset.name, layout, preset.experts, *lengths, memory.fits, why, memory.resident,
        memory.scratch.nbytes if memory.scratch else None, memory.memory.usable, decode.memory_bytes,
        roofline(decode, target.machine).bound,
        roofline(prefill_counts(config, target, sharding), target.machine).bound,
    )  # fmt: skip


def rows_as_json(rows: list[PresetRow]) -> list[dict[str, Any]]:
    """For `--json`."""
    return [asdict(row) for row in rows]


def print_presets(rows: list[PresetRow], console: Console) -> None:
    """The rows as a table; what does not fit has a line below it."""
    table = Table(
        "preset", "layout", "experts", "batch", "context", "prompt", "held, GiB", "scratch", "of", "fits",
        "GB a step", "TPOT, ms", "tokens/s", "TTFT, ms", title="presets: one rank's memory, modelled times",
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for column in table.columns[3:]:
        column.justify = "right"
    for row in rows:
        scratch = "" if row.scratch is None else f"{row.scratch / GIB:.1f}"
        times = (f"{row.tpot * 1e3:.2f}", f"{row.batch / row.tpot:,.0f}", f"{row.ttft * 1e3:,.0f}") if row.fits else ()
        table.add_row(
            row.name, row.layout, row.experts, str(row.batch), f"{row.context:,}", f"{row.prompt:,}",
            f"{row.resident / GIB:.1f}", scratch, f"{row.usable / GIB:.1f}", "yes" if row.fits else "no",
            f"{row.decode_bytes / 1e9:.2f}", *times,
        )  # fmt: skip
    console.print(table)
    for row in rows:
        if row.why_not:
            console.print(f"{row.name}: {row.why_not}", highlight=False, soft_wrap=True)
    console.print(
        "held: weights, cache and micro-code, computed. scratch: modelled, its fixed part reported for the published"
        " K2.5 port. Times: a roofline of peak rates, modelled, at the whole context; prefill in its PyTorch form.",
        style="dim", highlight=False,
    )  # fmt: skip
