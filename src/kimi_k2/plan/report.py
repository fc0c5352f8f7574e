"""A plan as data, as tables and as a chart. Figures are computed or modelled; what is reported names its source."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from kimi_k2.charts import chart
from kimi_k2.config import KimiK2Config
from kimi_k2.files import Json
from kimi_k2.plan.cost import GraphCounts, decode_counts, prefill_counts, prefill_instructions, roofline
from kimi_k2.plan.deployment import LINE, Target, check_context, load_target
from kimi_k2.plan.drafts import drafts_report, print_drafts
from kimi_k2.plan.kernels import Rates, print_kernel_step, step_bound
from kimi_k2.plan.machines import GIB
from kimi_k2.plan.memory import (
    TOWER,
    advice,
    cache_tokens,
    category,
    host_plan,
    longest_context,
    longest_context_with_scratch,
    memory_plan,
)
from kimi_k2.plan.published import WIDE, expect
from kimi_k2.plan.vision import print_vision, vision_report
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.sharding.experts import PARTITIONS, ConversionError, Matrix, expert_formats
from kimi_k2.sharding.layout import Layout


def stored_form(target: Target) -> Json | None:
    """Of INT4 experts on Neuron in a quantized format; None for others, which keep the checkpoint's values.

    Returns:
        Name of the format; `relative_l2` of its weights to the checkpoint's, computed on one random matrix.
    """
    config, layout = target.config, target.layout
    source, held = config.format_of_experts(), expert_formats().get(layout.experts) if target.is_neuron else None
    if not isinstance(source, Int4GroupFormat) or held is None or held.quantization_type is None:
        return None
    rows = min(PARTITIONS, config.moe_intermediate_size)
    return {"format": layout.experts, "relative_l2": conversion_error(config, layout, rows)}


def conversion_error(config: KimiK2Config, layout: Layout, rows: int) -> float:
    """Relative L2 of an expert's weights in a layout's format to the checkpoint's, on so many random rows."""
    source, error = config.format_of_experts(), ConversionError()
    weight = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(0))
    layout.expert_format(config).convert(Matrix(source.quantize(weight), source, *weight.shape), torch.bfloat16, error)
    return error.relative_l2


SCHEMA = "kimi-k2/plan/3"
_OF_TARGET = ("name", "batch", "context", "prompt", "prefill_sequences", "cache_ranks")
_OF_LAYOUT = ("ranks", "moe_tp", "moe_ep", "experts")
_OF_MEMORY = ("parts", "resident", "fits", "certain", "room", "needed", "verdict")


def make_answer(target: Target) -> Json:
    """Of `make_report` what answers whether a deployment fits and how long a token takes.

    Raises:
        ConfigError: a size does not divide among the ranks, or a rank's slice would cut a scale block.
    """
    memory, decode = memory_plan(target), decode_counts(target)
    bound, bound_of, kernels = step_bound(target, decode)
    report: Json = {
        "schema": SCHEMA,
        "target": {
            **{name: getattr(target, name) for name in _OF_TARGET},
            **{name: getattr(target.layout, name) for name in _OF_LAYOUT},
            "arrangement": "published port" if target.published_port else "ours",
            "framework": "vllm-neuron, torch-native" if target.torch_native else "NxDI" if target.is_neuron else "ours",
        },
        "rank_memory": {
            **{name: getattr(memory, name) for name in _OF_MEMORY},
            **asdict(target.memory),
            "scratch": {**asdict(memory.scratch), "nbytes": memory.scratch.nbytes} if memory.scratch else None,
            "longest_context": longest_context(memory),
            "longest_context_with_reported_scratch": longest_context_with_scratch(memory),
            "cache_tokens": cache_tokens(memory),
        },
        "decode": step(decode, target),
        "kernels": kernels,
        "tpot": {
            "bound": bound,
            "bound_of": bound_of,
            "collectives": kernels["contexts"][kernels["nearest"]]["range"] if kernels else [],
            "expected": expect(target, decode),
        },
        "machine": asdict(target.machine),
        "advice": advice(memory),
        "drafts": None,
        "lora": LINE if target.lora is not None else None,
    }
    if target.positions > 1:
        plain = make_answer(replace(target, positions=1, head=None))
        rates = Rates(**kernels["rates"]) if kernels else None
        report["drafts"] = drafts_report(target, bound, plain["tpot"]["bound"], rates)
    return report


def make_report(target: Target) -> Json:
    """Everything about one deployment; sizes in bytes, times in seconds.

    Raises:
        ConfigError: as `make_answer`.
    """
    report = make_answer(target)
    prefill, parts = prefill_counts(target), report["rank_memory"]["parts"]
    return {
        **report,
        "vision": vision_report(target.config, report["rank_memory"]["room"] + parts.get(TOWER, 0)),
        "stored_form": stored_form(target),
        "host": host_plan(target),
        "prefill": step(prefill, target) | {"instructions": prefill_instructions(target)},
        "ttft": {"bound": roofline(prefill, target.machine).bound},
    }


def plan(
    model: str | Path,
    preset: str = "trn2-tp32-ep2",
    *,
    max_model_len: int | None = None,
    batch_size: int | None = None,
    prompt_length: int | None = None,
) -> Json:
    """The report of `make_report` by names, as `kimi-k2 plan --json` prints it.

    Args:
        model: published name, or a directory with config.json.
        preset: name of a file in configs/, or a path to one.
        max_model_len: cache slots a sequence; the preset's if None, as for the next two.
        batch_size: sequences.
        prompt_length: tokens of the modelled prefill.

    Raises:
        ConfigError: there is no such model or preset, or a length is out of range.
    """
    config = KimiK2Config.load(model)
    target = load_target(preset, config).with_lengths(max_model_len, batch_size, prompt_length)
    check_context(config, max_model_len)
    return make_report(target)


def step(counts: GraphCounts, target: Target) -> Json:
    """One graph's counts on one rank and their modelled time, part by part."""
    reads = Counter[str]()
    for name, size in counts.read.items():
        reads["KV cache" if name == "cache" else category(name) if "." in name else name] += size
    modelled = roofline(counts, target.machine)
    return {
        "bytes_read": counts.bytes_read(),
        "bytes_read_by_part": {name: size for name, size in reads.items() if size},
        "bytes_moved": sum(counts.moved.values()),
        "flops": counts.flops,
        "collectives": [
            {"kind": collective.kind, "ranks": collective.ranks, "bytes": collective.nbytes, "times": times}
            for collective, times in counts.collectives.items()
        ],
        "collective_bytes": counts.collective_bytes,
        "modelled_seconds": {**asdict(modelled), "bound": modelled.bound},
    }


def print_answer(report: Json, console: Console) -> None:
    """Whether it fits, one TPOT with its kind, the three largest items, and what would make it fit."""
    _print_verdict(report, console)
    memory = report["rank_memory"]
    scratch = memory["needed"] - memory["resident"]
    items = {**memory["parts"], **({"scratch (modelled)": scratch} if scratch else {})}
    largest = sorted(items.items(), key=lambda item: -item[1])[:3]
    console.print("largest: " + ", ".join(f"{name} {size / GIB:.1f} GiB" for name, size in largest))
    console.print("--verbose has the rest")


def _print_verdict(report: Json, console: Console) -> None:
    target, memory = report["target"], report["rank_memory"]
    lengths = f"batch {target['batch']}, {target['context']:,} tokens"
    style = "green" if memory["certain"] else "yellow" if memory["fits"] else "bold red"
    console.print(f"{target['name']}, {target['ranks']} ranks, {lengths}: {memory['verdict']}", style=style)
    for line in (*(f"  it would fit with {line}" for line in report["advice"]), report["lora"], _longest(report)):
        if line:
            console.print(line)
    _print_time(report, console)
    if report["drafts"]:
        print_drafts(report["drafts"], console)


def expected_ms(time: dict[str, float], unit: str = "") -> str:
    """The expectation in milliseconds, and between which nine of ten are."""
    return f"{time['seconds'] * 1e3:.0f}{unit} ({time['low'] * 1e3:.0f} to {time['high'] * 1e3:.0f})"


def _print_time(report: Json, console: Console) -> None:
    """Expectation and bound, and what the expectation is from."""
    tpot, name = report["tpot"], "a step" if report["drafts"] else "TPOT"
    expected, bound = tpot["expected"], f"bound {tpot['bound'] * 1e3:.2f} ms (modelled: {tpot['bound_of']})"
    if tpot["collectives"]:
        low, high = tpot["collectives"][0], tpot["collectives"][-1]
        bound += (
            f", {high['tpot'] * 1e3:.1f} if a collective takes {high['latency'] * 1e6:.0f} us, not"
            f" {low['latency'] * 1e6:.0f}; {low['charged'] * 1e3:.1f} to {high['charged'] * 1e3:.1f} if weights wait"
        )
    if expected is None:
        console.print(f"{name}: {bound}")
        return
    fused = expected["if_scales_fuse"]
    words = f"expected {expected_ms(expected, ' ms')}" + (
        f", {expected_ms(fused, ' ms')} if the compiler fuses block scales" if fused else ""
    )
    console.print(f"{name}: {words}; {bound}")
    wide = f" (wider than {WIDE})" if expected["wide"] else ""
    near = "; ".join(f"{run['run']}, {run['tpot'] * 1e3:.1f} ms" for run in expected["nearest"])
    console.print(
        f"  expected by {expected['fitted']['runs']} published runs of {expected['fitted']['models']} models in this"
        f" form ({expected['form']}): nine of ten left out lie within a factor {expected['factor']:.2f} each way{wide}."
        f" Nearest: {near}",
        style="dim",
    )  # fmt: skip


def _longest(report: Json) -> str:
    memory, prompt = report["rank_memory"], report["target"]["prompt"]
    beside = memory["longest_context_with_reported_scratch"]
    ending = "" if beside is None else f", {beside:,} with scratch at the published port's pace; prompts of {prompt:,}"
    return f"longest context that fits: {memory['longest_context']:,} tokens{ending}"


def print_report(report: Json, console: Console) -> None:
    """The same, and the report as tables."""
    _print_verdict(report, console)
    memory, cache_ranks = report["rank_memory"], report["target"]["cache_ranks"]
    title = f"its cache over {cache_ranks} ranks" if cache_ranks > 1 else None
    table = Table("one rank holds", "GB", "GiB", "%", title=title)
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, size: int, style: str | None = None) -> None:
        share = f"{100 * size / memory['usable']:.1f}"
        table.add_row(name, f"{size / 1e9:.3f}", f"{size / GIB:.3f}", share, style=style)

    for name, size in memory["parts"].items():
        row(name, size)
    table.add_section()
    row("resident", memory["resident"], "bold")
    for source, name in _SCRATCH.items():
        if memory["scratch"] and memory["scratch"][source]:
            row(name, memory["scratch"][source])
    row("usable", memory["usable"])
    console.print(table)
    console.print(f"memory: {memory['source']}", style="dim")
    if form := report["stored_form"]:
        console.print(
            f"INT4 experts as {form['format']}: {100 * form['relative_l2']:.1f} % of the weights' norm off the"
            " checkpoint (computed on a random matrix); shared expert and attention as the checkpoint has them"
        )
    if report["vision"] is not None:
        print_vision(report["vision"], console)
    _print_steps(report, console)
    _print_host(report, console)


_SCRATCH = {
    "fixed": "scratch, fixed (reported for the K2.5 port)",
    "prefill": "scratch, live arrays of prefill (modelled)",
    "decode": "scratch, live arrays of decode (modelled)",
    "tower": "scratch, live arrays of the tower (modelled)",
}  # by source; the graphs share what they need


def _print_steps(report: Json, console: Console) -> None:
    prompt, batch = report["target"]["prompt"], report["target"]["prefill_sequences"]
    labels = ("a decode step", f"prefill of {batch} x {prompt:,} tokens")
    table = Table("one rank, modelled", *labels, title="bytes, operations and time")
    steps = (report["decode"], report["prefill"])
    for name in steps[0]["bytes_read_by_part"]:
        table.add_row(f"reads {name}", *(_size(stage["bytes_read_by_part"].get(name, 0)) for stage in steps))
    table.add_section()
    table.add_row("reads in all", *(_size(stage["bytes_read"]) for stage in steps))
    table.add_row("gathers and scatters", *(_size(stage["bytes_moved"]) for stage in steps))
    table.add_row("GFLOP", *(f"{stage['flops'] / 1e9:,.1f}" for stage in steps))
    table.add_row(
        "collectives",
        *(f"{sum(c['times'] for c in s['collectives'])}, {s['collective_bytes'] / 1e6:,.1f} MB" for s in steps),
    )
    for bound in ("memory", "compute", "communication"):
        table.add_row(f"{bound}, ms", *(f"{stage['modelled_seconds'][bound] * 1e3:.2f}" for stage in steps))
    table.add_row(
        "bound, ms (TPOT / TTFT, modelled)",
        *(f"{stage['modelled_seconds']['bound'] * 1e3:.2f}" for stage in steps),
        style="bold",
    )
    console.print(table)
    if counted := report["prefill"]["instructions"]:
        console.print(
            f"prefill's matrix multiplies: {counted['total'] / 1e6:.2f} million instructions at least, of"
            f" {counted['limit'] / 1e6:.0f} that neuronx-cc takes: {counted['follows']}",
        )
    source = report["machine"]["source"]
    console.print(f"bounds are modelled from peak rates, not measured: {source}", style="dim")
    if report["kernels"] is not None:
        print_kernel_step(report["kernels"], console)


def _print_host(report: Json, console: Console) -> None:
    host, index = report["host"], report.get("index")
    table = Table("host", "", title="conversion and load", show_header=False)
    for label, text in (
        ("convert reads, writes", f"{_size(host['convert_reads'])}, {_size(host['convert_writes'])}"),
        ("disk for both", _size(host["convert_disk"])),
        ("memory of the conversion", f"{_size(host['convert_peak_memory_estimate'])} (estimate)"),
        ("load reads", _size(host["load_reads"])),
        ("memory of the load", f"up to {_size(host['load_peak_memory_bound'])} (all ranks' tensors at once)"),
    ):
        table.add_row(label, text)
    if index is not None:
        stated = "no size" if index["total_size"] is None else _size(index["total_size"])
        table.add_row("index states", f"{stated}, {index['shards']} shards, {index['tensors']:,} tensors")
    console.print(table)


def _size(count: int) -> str:
    """Bytes with a unit that leaves three digits or more."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= factor:
            return f"{count / factor:,.3f} {unit}"
    return f"{count / 1e3:,.3f} kB"


def plot(target: Target, path: Path) -> None:
    """Write a stacked bar chart: one rank's memory by category, at the context asked for and at powers of four."""
    top = min(max(4 * target.context, 16384), target.config.max_position_embeddings)
    lengths = sorted({target.context, *(512 * 4**i for i in range(10) if 512 * 4**i <= top)})
    plans = [memory_plan(replace(target, context=n)) for n in lengths]
    base = [0.0] * len(plans)
    labels = [f"{n:,}" + ("\n(asked for)" if n == target.context else "") for n in lengths]
    title = f"{target.name}, batch {target.batch}: memory of one rank (computed)"
    with chart(path, 9, 5, xlabel="context (tokens a sequence)", ylabel="GiB a rank", title=title) as axes:
        from matplotlib import colormaps

        for number, name in enumerate(plans[0].parts):
            heights = [plan.parts[name] / GIB for plan in plans]
            axes.bar(labels, heights, 0.6, bottom=base, label=name, color=colormaps["tab20"](number))
            base = [low + height for low, height in zip(base, heights, strict=True)]
        if target.is_neuron:
            heights = [(plan.needed - plan.resident) / GIB for plan in plans]
            axes.bar(labels, heights, 0.6, bottom=base, fill=False, hatch="//", label="scratch, modelled")
        axes.axhline(target.memory.usable / GIB, color="black", linestyle="--", label="usable")
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
