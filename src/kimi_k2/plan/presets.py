"""Ways to run a model side by side: memory, bytes and modelled times of each preset, or why it cannot run.

And ways to serve it on one, two and four hosts of eight GPUs. Modelled: bounds by peak rates.

Tensor parallel, every rank works on all sequences and holds the whole latent cache of its layers. With attention data
parallel and experts shared out (DP+EP), a rank has its own sequences, all dense weights and its share of the experts;
two exchanges a MoE layer carry tokens to their experts' ranks and back. With a pipeline (PP) half of the sequences are
in each stage.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.files import Json
from kimi_k2.plan.comparison import gpu_lines
from kimi_k2.plan.cost import decode_counts, prefill_counts, roofline
from kimi_k2.plan.deployment import Deployment, Target, make_target, preset_names
from kimi_k2.plan.machines import GIB, INSTANCES, UTILIZATION, Instance
from kimi_k2.plan.memory import BF16, WORKSPACE, WORKSPACE_BYTES, category, expert_share, memory_plan, moe_layers
from kimi_k2.plan.report import expected_ms, make_answer
from kimi_k2.sharding.layout import Layout

LEADING = "trn2-tp32-ep2"
WIDTH = 165  # columns of the table


COLUMNS = (
    "preset", "layout", "experts", "batch", "context", "prompt", "held, GiB", "scratch", "of", "fits", "GB a step",
    "TPOT bound, ms", "expected, ms", "TTFT bound, ms",
)  # fmt: skip


def preset_rows(config: KimiK2Config) -> list[Json]:
    """A row for each preset: Trainium's first, the leading one at the top, each layout's by batch and context."""

    def order(preset: Deployment) -> tuple[object, ...]:
        family = preset.hardware.target != "neuron", not preset.name.startswith(LEADING), preset.tp_degree
        return (*family, preset.name != LEADING, preset.batch_size, preset.seq_len, preset.name)

    return [preset_row(config, preset) for preset in sorted(map(Deployment.load, preset_names()), key=order)]


def preset_row(config: KimiK2Config, preset: Deployment) -> Json:
    """The report of `make_answer`, the bound of TTFT, and `why_not`, a line.

    Where the model's sizes do not divide among the ranks, the target and that line alone.
    """
    try:
        target = make_target(preset, config)
        report = make_answer(target)
    except ConfigError as error:
        lengths = {"batch": preset.batch_size, "context": preset.seq_len, "prompt": preset.max_context_length}
        ranks = {"moe_tp": preset.moe_tp_degree, "moe_ep": preset.moe_ep_degree}
        return {"target": {"name": preset.name, "experts": preset.experts, **lengths, **ranks}, "why_not": str(error)}
    memory = report["rank_memory"]
    why = "" if memory["fits"] else f"{memory['verdict']}; it would fit with {report['advice'][0]}"
    return {**report, "why_not": why, "ttft": {"bound": roofline(prefill_counts(target), target.machine).bound}}


def cells(row: Json) -> list[str]:
    """A row as text, by COLUMNS; times of what fits alone."""
    target, memory = row["target"], row.get("rank_memory")
    texts = [target["name"], f"TP{target['moe_tp']} EP{target['moe_ep']}", target["experts"], str(target["batch"])]
    texts += [f"{target['context']:,}", f"{target['prompt']:,}"]
    if memory:
        scratch, step = memory["scratch"], row["decode"]
        texts += [f"{memory['resident'] / GIB:.1f}", f"{scratch['nbytes'] / GIB:.1f}" if scratch else ""]
        texts += [f"{memory['usable'] / GIB:.1f}", "yes" if memory["certain"] else "if" if memory["fits"] else "no"]
        texts.append(f"{(step['bytes_read'] + step['bytes_moved']) / 1e9:.2f}")
        if memory["fits"]:
            tpot, expected = row["tpot"], row["tpot"]["expected"]
            texts += [f"{tpot['bound'] * 1e3:.2f}", expected_ms(expected) if expected else ""]
            texts.append(f"{row['ttft']['bound'] * 1e3:,.0f}")
    return texts + [""] * (len(COLUMNS) - len(texts))


def print_presets(rows: list[Json], console: Console) -> None:
    """The rows as a table; what does not fit has a line below it."""
    table = Table(*COLUMNS, title="presets: one rank's memory, modelled times")
    table.columns[0].no_wrap = True
    for column in table.columns[3:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    for row in rows:
        if row["why_not"]:
            console.print(f"{row['target']['name']}: {row['why_not']}", soft_wrap=True)
    console.print(
        "held: weights, cache, and micro-code or an engine's workspaces. scratch: modelled, its fixed part reported for"
        " the published K2.5 port; 'if': only with less scratch than that port took. Bounds: peak rates, at the whole"
        " context; prefill in its PyTorch form. Expected: by published runs, `plan` names them.",
        style="dim",
    )  # fmt: skip


HOST = 8  # GPUs
REQUESTS, MOST = (1, 16, 64), 512  # of a GPU's share; beside these the most that fit, up to 512
# A GPU's part of the network between hosts: NVIDIA's DGX H100 and H200 have a port of 400 Gb/s for each.
NETWORK_BYTES_A_SECOND = 50e9


@dataclass(frozen=True)
class Served:
    """A way to serve.

    Attributes:
        name: as recipes have it.
        tensor: ranks that share one layer's attention and experts; 1 of DP+EP.
        ranks: among which the experts of a layer are divided.
        stages: of the pipeline.
    """

    name: str
    tensor: int
    ranks: int
    stages: int = 1

    @property
    def gpus(self) -> int:
        """In all."""
        return self.ranks * self.stages


WAYS = (
    Served("TP8", 8, 8),
    Served("DP8+EP8", 1, 8),
    Served("TP8 x PP2", 8, 8, 2),
    Served("DP16+EP16", 1, 16),
    Served("DP32+EP32", 1, 32),
)


@dataclass(frozen=True)
class ServedRow:
    """One way on one GPU at one load; bytes of a GPU, seconds modelled.

    Attributes:
        requests: of a GPU's share: all sequences over all GPUs.
        weights, needed: bytes of the weights, and with the sequences' cache and an engine's workspaces.
        read: bytes of a step.
        exchanges, exchanged: collectives of a step and what they send.
        tpot: of a step, all stages of it.
        tokens: a second a GPU.
    """

    gpu: str
    way: str
    gpus: int
    requests: int
    weights: int
    needed: int
    usable: int
    fits: bool
    read: int
    exchanges: int
    exchanged: int
    tpot: float
    tokens: float


def served_rows(config: KimiK2Config, context: int, requests: int | None = None) -> list[ServedRow]:
    """All ways on all GPUs, with so many cached tokens a sequence, at so many requests or at several up to the most."""
    rows = []
    for name, instance in INSTANCES.items():
        for way in WAYS if instance.target == "cuda" else ():
            least = _served_row(config, name, instance, way, context, requests or 1)
            rows.append(least)
            if requests is None and least.fits:
                fixed = least.weights + WORKSPACE_BYTES
                most = min((least.usable - fixed) // (least.needed - fixed), MOST)
                loads = sorted({each for each in (*REQUESTS, most) if 1 < each <= most})
                rows += [_served_row(config, name, instance, way, context, each) for each in loads]
    return rows


def _served_row(
    config: KimiK2Config, gpu: str, instance: Instance, way: Served, context: int, requests: int
) -> ServedRow:
    layout = Layout(way.tensor, 1, "cuda", "bf16" if config.quantization is None else "stored")
    machine, usable = instance.machine, instance.memory.usable
    # Tensor parallel a rank has all sequences of its stage, and all stages are at work at a time.
    target = Target(way.name, config, layout, machine, instance.memory, requests * way.tensor, context, context)
    counts, parts = decode_counts(target), memory_plan(target).parts
    if way.tensor == 1:
        chosen = expert_share(target, requests * way.gpus)
        for name, resident in counts.held.items():
            if category(name).startswith("expert"):
                counts.read[name] = round(resident / way.ranks * chosen)
        parts = {name: size // (way.ranks if name.startswith("expert") else 1) for name, size in parts.items()}
        # A token goes once to each rank that has an expert of its choice, and comes back; both in BF16.
        ranks = way.ranks * (1 - (1 - 1 / way.ranks) ** config.num_experts_per_tok)
        exchanges = 2 * moe_layers(config)
        exchanged = exchanges * requests * ranks * config.hidden_size * BF16
    else:
        exchanges = sum(counts.collectives.values())
        exchanged = sum(
            2 * (way.ranks - 1) / way.ranks * collective.nbytes * n for collective, n in counts.collectives.items()
        )
    hosts = way.ranks // HOST  # over which a layer is spread
    between = exchanged * (hosts - 1) / hosts
    step = roofline(counts, machine).alone + exchanges * machine.collective_latency
    step += max(between / NETWORK_BYTES_A_SECOND, (exchanged - between) / machine.link_bytes_per_second)
    resident = sum(size for name, size in parts.items() if name not in ("KV cache", WORKSPACE)) // way.stages
    needed = resident + parts["KV cache"] + parts[WORKSPACE]
    return ServedRow(
        gpu, way.name, way.gpus, requests, resident, needed, usable, needed <= usable,
        counts.memory_bytes // way.stages, exchanges, round(exchanged), step, requests / step,
    )  # fmt: skip


def print_served(rows: list[ServedRow], context: int, console: Console) -> None:
    """The rows as a table, and what others published."""
    table = Table(
        "GPU", "layout", "GPUs", "requests a GPU", "weights, GiB", "needed", "of", "fits", "GB a step",
        "exchanges", "GB sent", "TPOT, ms", "tokens/s a GPU",
        title=f"GPUs, {context:,} tokens a sequence; modelled bounds",
    )  # fmt: skip
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        sizes = (f"{size / GIB:.1f}" for size in (row.weights, row.needed, row.usable))
        step = (f"{row.tpot * 1e3:.2f}", f"{row.tokens:,.0f}") if row.fits else ()
        table.add_row(
            row.gpu, row.way, str(row.gpus), str(row.requests), *sizes, "yes" if row.fits else "no",
            f"{row.read / 1e9:.2f}", str(row.exchanges), f"{row.exchanged / 1e9:.3f}", *step,
        )  # fmt: skip
    console.print(table)
    console.print(
        "Modelled: bytes or arithmetic at peak rates, whichever takes longer, and exchanges behind them, none of which"
        f" hides another; uniform routing; needed: with caches and {WORKSPACE_BYTES / GIB:.1f} GiB of an engine's"
        f" workspaces, of {UTILIZATION:.0%} of the card; exchanges 2.5 us each beside their"
        f" bytes (sums of four H200s, measured),"
        f" {NETWORK_BYTES_A_SECOND / 1e9:.0f} GB/s a GPU between hosts. Published by others:",
        style="dim",
    )  # fmt: skip
    for line in gpu_lines():
        console.print(f"  {line}")
