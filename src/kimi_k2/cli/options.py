"""Options that several commands share, each an annotated type with its help."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

import typer

Dtype = Literal["float32", "bfloat16", "float64"]
Target = Literal["neuron", "cuda"]
ExpertFormat = Literal["bf16", "blockwise", "per_channel", "stored"]


def published_models() -> list[str]:
    """Published configurations that the package carries."""
    names = (entry.name for entry in (files("kimi_k2") / "presets").iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def _known_model(name: str) -> str:
    if name not in published_models():
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(published_models())}")
    return name


DEFAULT_MODEL = "kimi-k2-instruct-0905"
Model = Annotated[
    str,
    typer.Option(
        "--model",
        callback=_known_model,
        autocompletion=published_models,
        help="Published configuration: names, YaRN, quantization.",
    ),
]
Checkpoint = Annotated[
    Path, typer.Argument(help="Checkpoint directory: config.json, *.safetensors, index.", metavar="CHECKPOINT")
]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of everything random.")]
ChatStyleOption = Annotated[
    Literal["instruct", "thinking", "k2.5"] | None,
    typer.Option("--chat-style", help="Chat format; from the checkpoint's template or name if not given."),
]
KeepQuantized = Annotated[
    bool,
    typer.Option(
        "--keep-quantized",
        help="Hold FP8/INT4 weights as stored, as ranks always do: less memory; with BF16 on an H200 fast.",
    ),
]
Ranks = Annotated[
    Path | None,
    typer.Option(help="Weights: output of `convert --target cuda`, a rank a process of `torchrun --no-python`."),
]
TargetOption = Annotated[Target, typer.Option(help="neuron: NxDI's names and layouts; cuda: the checkpoint's own.")]
ExpertsOption = Annotated[
    ExpertFormat | None,
    typer.Option(help="Experts' format: per_channel (neuron's default), blockwise, bf16; stored (cuda's default)."),
]
