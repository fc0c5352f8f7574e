"""The planner beside what others published: a step's bound and expectation, each model held out, and memory; and GPUs.

The figures are reported, not reproduced.
"""

from __future__ import annotations

from dataclasses import asdict, replace

from rich.console import Console
from rich.table import Table

from kimi_k2.config import KimiK2Config
from kimi_k2.files import Json
from kimi_k2.plan.deployment import load_target
from kimi_k2.plan.machines import GIB
from kimi_k2.plan.memory import MICROCODE_BYTES, memory_plan, reported_scratch
from kimi_k2.plan.published import Range, Run, data, features, fit, runs, source_words

DENSE = "a dense model, of a form with enough runs of mixtures of experts"


def published_memory() -> list[Json]:
    """All figures that there are beside plans in the arrangement of the published ports, in GiB.

    published.json says why they are not GB. `terms` of the plan by name, `planned` their sum, `difference` that over
    the published one, minus 1.
    """
    rows = []
    for row in data()["memory"]["rows"]:
        target = load_target(row["preset"], KimiK2Config.from_preset(row["model"]))
        plan = memory_plan(replace(target, context=row["context"], batch=1, published_port=True))
        # A NEFF's tensors are without the runtime's micro-code and scratch.
        terms = {name: size / GIB for name, size in plan.parts.items() if name != "runtime micro-code"}
        if row["of"] == "bank":
            terms["runtime micro-code"] = MICROCODE_BYTES / GIB
            terms["decode scratch, as its README states it"] = reported_scratch(row["context"]).nbytes / GIB
        planned = sum(terms.values())
        rows.append(
            {
                "what": row["what"], "published": row["gib"], "terms": terms, "source": source_words(row["source"]),
                "planned": planned, "difference": planned / row["gib"] - 1, "unit": "GiB",
            }
        )  # fmt: skip
    return rows


def held_out(run: Run) -> Range:
    """What a run's step is expected to take by the runs of other models, of the same form; seconds."""
    found = fit(run.form, run.model)
    return Range.around(sum(a * b for a, b in zip(found.terms, features(run), strict=True)), found.factor)


def comparison() -> Json:
    """For `--json`: every published run with bound and, unless it is set apart, what the others make of it."""
    apart, steps = data()["rules"]["set_apart"], []
    for run in runs():
        fitted = run in fit(run.form).rows
        expected = held_out(run) if fitted else None
        steps.append(
            {
                "run": run.name, "form": run.form, "source": source_words(run.source), "tpot": run.tpot_ms / 1e3,
                "bound": run.bound_ms / 1e3, "expected": asdict(expected) if expected else None,
                "within": expected.low <= run.tpot_ms / 1e3 <= expected.high if expected else None,
                "set_apart": None if fitted else apart[run.set_apart] if run.set_apart else DENSE,
            }
        )  # fmt: skip
    return {"steps": steps, "rules": data()["rules"], "memory": published_memory(), "gpus": data()["gpus"]}


def print_comparison(found: Json, console: Console) -> None:
    """The same as tables."""
    table = Table("published decode step", "form", "ms", "bound", "expected (held out)", "within", title="Trainium, ms")
    for row in found["steps"]:
        expected, words = row["expected"], ("set apart", "")
        if expected:
            low, middle, high = (expected[name] * 1e3 for name in ("low", "seconds", "high"))
            words = f"{middle:.1f} ({low:.1f} to {high:.1f})", "yes" if row["within"] else "no"
        times = (f"{row['tpot'] * 1e3:.1f}", f"{row['bound'] * 1e3:.1f}")
        table.add_row(row["run"], row["form"], *times, *words)
    console.print(table)
    for cause in dict.fromkeys(row["set_apart"] for row in found["steps"] if row["set_apart"]):
        count = sum(row["set_apart"] == cause for row in found["steps"])
        console.print(f"  set apart, {count}: {cause}", style="dim")
    table = Table("published memory", "reported", "planned", "difference", title="published arrangement, GiB")
    for row in found["memory"]:
        table.add_row(
            row["what"], f"{row['published']:.2f}", f"{row['planned']:.2f}", f"{100 * row['difference']:+.1f} %"
        )
        for name, size in row["terms"].items():
            table.add_row(f"  {name}", "", f"{size:.3f}", "", style="dim")
    console.print(table)
    for line in gpu_lines():
        console.print(f"  {line}")


def gpu_lines() -> list[str]:
    """What others reported of GPUs, a line each."""
    units = {"tpot_ms": "ms a token", "ttft_ms": "ms to the first", "tokens_a_second_a_gpu": "tokens/s a GPU"}
    return [
        f"{row['what']}, {row['cards']}: "
        + ", ".join(f"{row[name]:,} {unit}" for name, unit in units.items() if name in row)
        + " (reported)"
        for row in data()["gpus"]
    ]
