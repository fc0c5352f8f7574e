"""Render the figures of README and docs from where they are recorded or computed: `python scripts/tables.py`.

A measured table of docs/measured.json has `made` (card, date, the commit that recorded it, and the command if one
prints it), `columns` and `rows`; it stands in a document behind `<!-- measured: NAME -->`, with a line that says how it
was made. A planned one stands behind `<!-- planned: MODEL PRESET ... -->`: rows of `kimi-k2 plan --all-presets`.
Kimi's published runs stand behind `<!-- published: Kimi-K2 -->`.

Figures in sentences are in docs/figures.json: by document the sentence, with {} for each figure, and where each is
from: a cell of measured.json, a plan, or what others published. All other numbers of a document's text stand there
under its headings, as they were recorded (`python scripts/tables.py --record`): a number changed in one place is seen.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from kimi_k2.bench.render import markdown_table
from kimi_k2.config import KimiK2Config
from kimi_k2.plan.comparison import published_memory
from kimi_k2.plan.deployment import Deployment
from kimi_k2.plan.expectation import fit
from kimi_k2.plan.presets import PresetRow, preset_row, served_rows
from kimi_k2.plan.published import KIMI_HEADER, kimi_rows, runs
from kimi_k2.plan.report import plan

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
BLOCK = re.compile(r"<!-- (measured|planned|published): ([\w .-]+) -->\n.*\n\n(?:\|.*\n)+")
STATED = re.compile(r"(?<![\w.])\d[\d.,]*(?:e-?\d+)?(?<=\d)")
NUMBER = r"(\d[\d.,]*(?:e-?\d+)?(?<=\d))"
PLANNED = (
    "preset", "batch x context, prompt", "held, GiB", "scratch, GiB", "fits", "GB a step", "TPOT bound",
    "expected", "TTFT bound",
)  # fmt: skip
FITS = {(True, True): "yes", (True, False): "if", (False, False): "no"}


@cache
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
    for entry in _sentences(name):
        text = _sentence(text, entry["text"], [_figure(source) for source in entry["from"]])
    tables = {"measured": _measured, "planned": _planned, "published": _published}
    return BLOCK.sub(lambda match: tables[match[1]](match[2]), text)


def _sentences(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _json("figures.json")["rendered"].get(name, [])
    return found


def stated(text: str, name: str) -> dict[str, str]:
    """All numbers of a document that nothing renders, in order, by heading; not those of commands and addresses."""
    for entry in _sentences(name):
        text = _sentence(text, entry["text"], ["" for _ in entry["from"]])
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


def _figure(source: dict[str, Any]) -> str:
    """The words of one figure: a value, times `scale`, in `format`."""
    if "measured" in source:
        cell = _json("measured.json")[source["measured"]]["rows"][source["row"]][source["column"]]
        value: Any = re.search(source["match"], cell)[1]  # type: ignore[index]
        value = value if "format" not in source else float(value)
    elif "plan" in source:
        value = _report(*source["plan"])
        for key in source["path"].split("."):
            value = value[int(key) if key.isdecimal() and isinstance(value, list) else key]
    elif "gpus" in source:
        value = _gpus(*source["gpus"])[source["path"]]
    elif "fit" in source:
        term = fit(source["fit"]).terms[source["term"]]
        value = term if source["term"] == 2 else 1 / term  # seconds a layer, or a share of the peak rate
    elif "runs" in source:
        value = len(runs())
    elif "run" in source:
        value = getattr(next(run for run in runs() if run.name == source["run"]), source["field"])
    else:
        differences = [row.difference for row in published_memory()]
        value = min(differences) if source["memory"] == "least" else max(differences)
    if "format" not in source:
        return str(value)
    return format(1 / value if source.get("inverse") else value * source.get("scale", 1), source["format"])


@cache
def _report(model: str, preset: str) -> dict[str, Any]:
    return plan(model, preset)


@cache
def _gpus(model: str, gpu: str, way: str) -> dict[str, Any]:
    rows = served_rows(KimiK2Config.from_preset(model), 4096, 1)
    return asdict(next(row for row in rows if (row.gpu, row.way) == (gpu, way)))


def _measured(name: str) -> str:
    recorded = _json("measured.json")[name]
    made, table = recorded["made"], markdown_table(recorded["columns"], recorded["rows"])
    command = f": `{made['command']}`" if "command" in made else ""
    caption = f"*{made['card']}, {made['date']}, recorded by {made['commit']}{command}*"
    return f"<!-- measured: {name} -->\n{caption}\n\n{table}"


def _published(name: str) -> str:
    caption = "*quoted: `kimi-k2 plan kimi-k2-instruct-0905 --published` has other models beside these*"
    return f"<!-- published: {name} -->\n{caption}\n\n{markdown_table(KIMI_HEADER, kimi_rows())}"


def _planned(words: str) -> str:
    model, *presets = words.split()
    config = KimiK2Config.from_preset(model)
    rows = [_cells(preset_row(config, Deployment.load(name))) for name in presets]
    caption = f"*computed and modelled: `kimi-k2 plan {model} --all-presets`*"
    return f"<!-- planned: {words} -->\n{caption}\n\n{markdown_table(list(PLANNED), rows)}"


def _cells(row: PresetRow) -> list[str]:
    expected = [f"{1e3 * time:.0f}" for time in (row.expected, row.low, row.high) if time is not None]
    return [
        row.name, f"{row.batch} x {row.context:,}, {row.prompt:,}", f"{row.resident / 2**30:.1f}",
        f"{(row.scratch or 0) / 2**30:.1f}", FITS[row.fits, row.certain], f"{row.decode_bytes / 1e9:.2f}",
        f"{1e3 * row.tpot:.2f} ms", "{} ms ({} to {})".format(*expected), f"{1e3 * row.ttft:.0f} ms",
    ]  # fmt: skip


def picture(title: str, labels: list[str], series: dict[str, list[float]], line: tuple[str, float] | None) -> str:
    """Bars as SVG: of each label the series side by side, or one on the other under a line."""
    top = 1.1 * (
        max(map(max, series.values())) if line is None else max(line[1], *map(sum, zip(*series.values(), strict=True)))
    )
    step, drawn = 620 / len(labels), [f'<text x="20" y="20" font-weight="bold">{title}</text>']
    for number, (name, values) in enumerate(series.items()):
        colour, legend = ("#7a869a", "#1f6feb", "#f2a33a")[number], 330 + 130 * number
        drawn.append(f'<rect x="{legend}" y="11" width="10" height="10" fill="{colour}"/>')
        drawn.append(f'<text x="{legend + 15}" y="20">{name}</text>')
        for place, value in enumerate(values):
            below = sum(list(series.values())[n][place] for n in range(number)) if line else 0
            width = step / (2 if line else len(series) + 1)
            x, height = 60 + place * step + (0 if line else number * width), 160 * value / top
            y = 195 - height - 160 * below / top
            drawn.append(f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" fill="{colour}"/>')
            right, down = (width + 4, height / 2 + 4) if line else (4, -3)
            drawn.append(f'<text x="{x + right:.0f}" y="{y + down:.0f}">{value:.3g}</text>')
    drawn += [f'<text x="{60 + n * step:.0f}" y="210">{label}</text>' for n, label in enumerate(labels)]
    if line:
        y = 195 - 160 * line[1] / top
        drawn.append(f'<path d="M20 {y:.0f}H690" stroke="black" stroke-dasharray="5"/>')
        drawn.append(f'<text x="20" y="{y - 4:.0f}">{line[0]} {line[1]:.1f}</text>')
    body = "\n".join(drawn)
    opened = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 700 220" font-family="sans-serif" font-size="11">'
    return f"{opened}\n{body}\n</svg>\n"


def pictures() -> dict[str, str]:
    """README's, by file of docs: memory by context, and vLLM's own model beside ours."""
    config, contexts = KimiK2Config.from_preset("kimi-k2-instruct-0905"), [4096, 16384, 65536, 131072]
    plans = [plan("kimi-k2-instruct-0905", "trn2-tp64-ep1", max_model_len=tokens)["rank_memory"] for tokens in contexts]
    held = {
        "weights and code": [(one["resident"] - one["parts"]["KV cache"]) / 2**30 for one in plans],
        "KV cache": [one["parts"]["KV cache"] / 2**30 for one in plans],
        "scratch (model)": [one["scratch"]["nbytes"] / 2**30 for one in plans],
    }
    title = f"trn2-tp64-ep1, {config.num_hidden_layers} layers, GiB a core by context"
    rows = _json("measured.json")["vllm-h200"]["rows"]
    times = [[float(part) for part in re.findall(r"[\d.]+", row[1])[:2]] for row in rows]
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
        numbers = {name: stated(path.read_text(encoding="utf-8"), name) for name, path in documents().items()}
        text = json.dumps({**_json("figures.json"), "stated": numbers}, indent=1, ensure_ascii=False)
        (DOCS / "figures.json").write_text(text + "\n", encoding="utf-8")
