"""Render the figures of README and docs from where they are recorded or computed: `python scripts/tables.py`.

A measured table of docs/measured.json has `made` (card, date, the commit that recorded it, and the command if one
prints it), `columns` and `rows`; it stands in a document behind `<!-- measured: NAME -->`, with a line that says how it
was made. A planned one stands behind `<!-- planned: MODEL PRESET ... -->`: rows of `kimi-k2 plan --all-presets`.
Kimi's published runs stand behind `<!-- published: Kimi-K2 -->`.

Figures in sentences are in docs/figures.json, "rendered": by document the sentence, with {} for each figure, and for
each an object of `OBJECTS`, a path in it, and steps: `~` a match, `*` times, `/` of which it is a divisor, or a format.
All other numbers of a document's text, measured or quoted, stand under "stated" by heading, with their source, as
`python scripts/tables.py --record` took them: a number changed in one place is seen.
"""

from __future__ import annotations

import functools
import importlib
import io
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib import pyplot as plt

from kimi_k2.bench.render import markdown_table
from kimi_k2.config import KimiK2Config
from kimi_k2.nki.step_counts import stored
from kimi_k2.plan.comparison import published_memory
from kimi_k2.plan.cost import prefill_counts, roofline
from kimi_k2.plan.deployment import Deployment, load_target
from kimi_k2.plan.machines import INSTANCES, TRN2_LNC2
from kimi_k2.plan.presets import COLUMNS, ServedRow, cells, preset_row, served_rows
from kimi_k2.plan.published import KIMI_HEADER, fit, kimi_rows, runs
from kimi_k2.plan.report import conversion_error, plan
from kimi_k2.plan.vision import image_cost, tower_bytes
from kimi_k2.serving.vllm.adapter import ATTRIBUTES, NAMES
from kimi_k2.sharding.dry_run import FOLD_FLOPS, dry_run
from kimi_k2.vision_config import Grid

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"<!-- (measured|planned|published): ([\w .-]+) -->\n.*\n\n(?:\|.*\n)+")
STATED = re.compile(r"(?<![\w.])\d[\d.,]*(?:e-?\d+)?(?<=\d)")
NUMBER = r"(\d[\d.,]*(?:e-?\d+)?(?<=\d))"


@functools.cache
def _json(name: str) -> Any:
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


def rendered(text: str, name: str = "") -> str:
    """A document with its tables and the figures of its sentences as they are recorded and computed.

    Args:
        text: of the document.
        name: under which docs/figures.json has it.

    Raises:
        KeyError: a table is not recorded.
        ValueError: a sentence stands not once in the document.
    """
    for template, sources in _sentences(name).items():
        text = _sentence(text, template, list(map(_figure, sources)))
    tables: dict[str, Callable[[str], str]] = {"measured": _measured, "planned": _planned, "published": _published}
    return BLOCK.sub(lambda match: tables[match[1]](match[2]), text)


def _sentences(name: str) -> dict[str, list[list[str]]]:
    found: dict[str, list[list[str]]] = _json("figures.json")["rendered"].get(name, {})
    return found


def stated(text: str, name: str) -> dict[str, str]:
    """All numbers of a document that nothing renders, in order, by heading; not those of commands and addresses."""
    for template, sources in _sentences(name).items():
        text = _sentence(text, template, ["" for _ in sources])
    text = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", " ", BLOCK.sub("", text), flags=re.DOTALL)
    found: dict[str, str] = {}
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        heading, _, rest = section.partition("\n")
        if numbers := STATED.findall(rest):
            found[heading.lstrip("# ")] = " ".join(numbers)
    return found


def pattern(template: str) -> re.Pattern[str]:
    """What a sentence with any figures looks like; lines may break anywhere."""
    pieces = [r"\s+".join(map(re.escape, re.split(r"\s+", piece))) for piece in template.split("{}")]
    return re.compile(NUMBER.join(pieces))


def _sentence(text: str, template: str, figures: list[str]) -> str:
    found = list(pattern(template).finditer(text))
    if len(found) != 1:
        raise ValueError(f"expected once, stands {len(found)} times: {template}")
    for group in range(len(figures), 0, -1):
        text = text[: found[0].start(group)] + figures[group - 1] + text[found[0].end(group) :]
    return text


def _figure(source: list[str]) -> str:
    words, path, *steps = source
    value = functools.reduce(_part, path.split("."), _object(words))
    for step in steps:
        rest = step[1:]
        if step[0] == "~":
            value = re.search(rest, value)[1]  # type: ignore[index]
        elif step[0] in "*/":
            value = float(value) * float(rest) if step[0] == "*" else float(rest) / float(value)
        else:
            value = format(float(value) if isinstance(value, str) else value, step)
    return str(value)


def _part(whole: Any, key: str) -> Any:
    if isinstance(whole, dict):
        return whole[key]
    return whole[int(key)] if isinstance(whole, list | tuple) else getattr(whole, key)


@functools.cache
def _object(words: str) -> Any:
    kind, *names = words.split(" ")
    return OBJECTS[kind](*names)


def _gpus(model: str, gpu: str, way: str, requests: str = "1") -> ServedRow:
    rows = served_rows(KimiK2Config.from_preset(model), 4096, int(requests))
    return next(row for row in rows if (row.gpu, row.way) == (gpu, way))


def _convert(model: str, preset: str) -> dict[str, float]:
    """Of a conversion on two cores."""
    config = KimiK2Config.from_preset(model)
    layout = Deployment.load(preset).layout(config)
    sizes, error = dry_run(config, layout), conversion_error(config, layout, config.moe_intermediate_size)
    hours = sizes.seconds() / 3600
    folds = sizes.fold_flops / FOLD_FLOPS / 3600
    return {**asdict(sizes), "hours": hours, "fold_hours": folds, "error": error}


def _prefill(model: str, preset: str, rows: str) -> dict[str, float]:
    """Of a preset whose experts take so many rows at once."""
    config = KimiK2Config.from_preset(model)
    target = replace(load_target(preset, config), prefill_rows_at_once=int(rows))
    return {"ttft": roofline(prefill_counts(target), target.machine).bound}


def _split(model: str, preset: str) -> dict[str, Any]:
    """What splitting the cache over groups adds and spares."""
    given = plan(model, preset)
    target, read = given["target"], given["decode"]["bytes_read_by_part"]["KV cache"]
    calls = sum(call["times"] for call in given["decode"]["collectives"] if call["ranks"] == target["cache_ranks"])
    spared = read * (target["cache_ranks"] - 1) / TRN2_LNC2.bytes_per_second
    return {"collectives": calls, "seconds": calls * TRN2_LNC2.collective_latency, "spared": spared}


OBJECTS: dict[str, Callable[..., Any]] = {
    "measured": lambda name: _json("measured.json")[name]["rows"],
    "plan": lambda model, preset, *tokens: plan(model, preset, max_model_len=int(tokens[0]) if tokens else None),
    "config": KimiK2Config.from_preset,
    "preset": Deployment.load,
    "instance": INSTANCES.__getitem__,
    "module": importlib.import_module,
    "convert": _convert,
    "prefill": _prefill,
    "split": _split,
    "gpus": _gpus,
    "tower": lambda model, side: image_cost(KimiK2Config.from_preset(model), Grid(1, int(side), int(side))),
    "bytes": lambda model: {"tower": tower_bytes(KimiK2Config.from_preset(model))},
    "fit": lambda *words: fit(" ".join(words)),
    "run": lambda *words: next(run for run in runs() if run.name == " ".join(words)),
    "runs": lambda: {"count": len(runs())},
    "memory": lambda: sorted(row["difference"] for row in published_memory()),
    "counted": lambda: stored()["presets"],
    "reached": lambda: {"names": len(NAMES), "attributes": sum(map(len, ATTRIBUTES.values()))},
}


def _measured(name: str) -> str:
    recorded = _json("measured.json")[name]
    origin, table = recorded["made"], markdown_table(recorded["columns"], recorded["rows"])
    command = f": `{origin['command']}`" if "command" in origin else ""
    caption = f"*{origin['card']}, {origin['date']}, recorded by {origin['commit']}{command}*"
    return f"<!-- measured: {name} -->\n{caption}\n\n{table}"


@functools.cache
def _published(name: str) -> str:
    caption = "*quoted: `kimi-k2 plan kimi-k2-instruct-0905 --verbose` has other models beside these*"
    return f"<!-- published: {name} -->\n{caption}\n\n{markdown_table(KIMI_HEADER, kimi_rows())}"


@functools.cache
def _planned(words: str) -> str:
    model, *presets = words.split()
    config = KimiK2Config.from_preset(model)
    found = [dict(zip(COLUMNS, cells(preset_row(config, Deployment.load(name))), strict=True)) for name in presets]
    columns = [name for name in COLUMNS if name not in ("layout", "experts", "of")]
    rows = [[row[column] for column in columns] for row in found]
    caption = f"*computed and modelled: `kimi-k2 plan {model} --all-presets`*"
    return f"<!-- planned: {words} -->\n{caption}\n\n{markdown_table(columns, rows)}"


def picture(title: str, labels: list[str], series: dict[str, list[float]], line: tuple[str, float] | None) -> str:
    """Bars as SVG: of each label the series side by side, or one on the other under a line."""
    text, colours = io.StringIO(), ("#7a869a", "#1f6feb", "#f2a33a")
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif", "font.size": 8}):
        figure, axes = plt.subplots(figsize=(7, 2.4), layout="constrained")
        base, positions = np.zeros(len(labels)), np.arange(len(labels))
        for number, (name, values) in enumerate(series.items()):
            shift = 0 if line else 0.38 * number - 0.19
            bars = axes.bar(positions + shift, values, 0.36, bottom=base, label=name, color=colours[number])
            axes.bar_label(bars, fmt="%.3g", label_type="center" if line else "edge")
            base += values if line else 0
        if line:
            axes.axhline(line[1], color="black", linestyle="--", zorder=0, label=f"{line[0]} {line[1]:.1f}")
        axes.set_xticks(positions, labels)
        axes.set_title(title, loc="left", fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        plt.close(figure)
    return text.getvalue()


def pictures() -> dict[str, str]:
    """README's, by file of docs: memory by context, and vLLM's own model beside ours."""
    config, contexts = KimiK2Config.from_preset("kimi-k2-instruct-0905"), [4096, 16384, 65536, 131072]
    plans = [plan("kimi-k2-instruct-0905", "trn2-tp64-ep1", max_model_len=tokens)["rank_memory"] for tokens in contexts]
    held = {
        "weights and code": [(memory["resident"] - memory["parts"]["KV cache"]) / 2**30 for memory in plans],
        "KV cache": [memory["parts"]["KV cache"] / 2**30 for memory in plans],
        "scratch (model)": [memory["scratch"]["nbytes"] / 2**30 for memory in plans],
    }
    title = f"trn2-tp64-ep1, {config.num_hidden_layers} layers, GiB a core by context"
    rows = _json("measured.json")["vllm-h200"]["rows"]
    times = [[float(number) for number in re.findall(r"[\d.]+", row[1])[:2]] for row in rows]
    stock, ours = (list(values) for values in zip(*times, strict=True))
    labels = [f"{row[0]} requests" for row in rows]
    return {
        "memory.svg": picture(title, [f"{n:,}" for n in contexts], held, ("usable", plans[0]["usable"] / 2**30)),
        "hopper.svg": picture(
            "One H200, 12 layers, FP8: TPOT in ms", labels, {"vLLM's own model": stock, "ours": ours}, None
        ),
    }


def documents() -> dict[str, Path]:
    """README and docs by the names that docs/figures.json has."""
    return {"README.md": ROOT / "README.md", **{path.name: path for path in sorted(DOCS.glob("*.md"))}}


if __name__ == "__main__":
    for name, path in documents().items():
        path.write_text(rendered(path.read_text(encoding="utf-8"), name), encoding="utf-8")
    for name, drawing in pictures().items():
        (DOCS / name).write_text(drawing, encoding="utf-8")
    if sys.argv[1:] == ["--record"]:
        old = _json("figures.json")["stated"]
        numbers = {
            name: {
                heading: {"source": old.get(name, {}).get(heading, {}).get("source", ""), "numbers": found}
                for heading, found in stated(path.read_text(encoding="utf-8"), name).items()
            }
            for name, path in documents().items()
        }
        text = json.dumps({**_json("figures.json"), "stated": numbers}, indent=1, ensure_ascii=False)
        (DOCS / "figures.json").write_text(text + "\n", encoding="utf-8")
