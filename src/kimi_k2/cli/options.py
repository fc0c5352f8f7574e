"""Options that several commands share, each an annotated type with its help."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config

Dtype = Literal["float32", "bfloat16", "float64"]
Target = Literal["neuron", "cuda"]


def compute_defaults(device: str, dtype: str | None, keep_quantized: bool | None) -> tuple[str, bool]:
    """Compute dtype, and whether weights are held as stored: what our kernels take on a GPU, where it is not said."""
    on_gpu = device.startswith("cuda")
    chosen = dtype or ("bfloat16" if on_gpu else "float32")
    return chosen, on_gpu and chosen == "bfloat16" if keep_quantized is None else keep_quantized


def published_models() -> list[str]:
    """Published configurations that the package carries."""
    names = (entry.name for entry in (files("kimi_k2") / "presets").iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def _known_model(name: str) -> str:
    if name not in published_models():
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(published_models())}")
    return name


def expert_names() -> list[str]:
    """Formats of routed experts that `convert` writes."""
    from kimi_k2.sharding.experts.format import expert_formats
    from kimi_k2.sharding.layout import STORED

    return [*expert_formats(), STORED]


def format_names() -> list[str]:
    """Formats that a checkpoint is stored in."""
    from kimi_k2.quantization.stored import formats

    return list(formats())


def _one_of(name: str | None, known: Callable[[], list[str]]) -> str | None:
    if name is not None and name not in known():
        raise typer.BadParameter(f"{name!r} is not one of {', '.join(known())}")
    return name


def _known_experts(name: str | None) -> str | None:
    return _one_of(name, expert_names)


def _known_format(name: str | None) -> str | None:
    return _one_of(name, format_names)


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
MOST = 2**31 - 1  # of whatever is counted


def number(least: int, text: str) -> Any:
    """An option that is a number of something."""
    return typer.Option(min=least, max=MOST, help=text)


def _not_empty(texts: list[str] | None) -> list[str] | None:
    if texts is not None and not all(texts):
        raise typer.BadParameter("expected at least one character")
    return texts


def picture(path: Path | None) -> Path | None:
    """Callback of options for pictures: the suffix is one that matplotlib writes, the directory is there."""
    suffixes = (".png", ".svg", ".pdf")
    if path is not None and path.suffix.lower() not in suffixes:
        raise typer.BadParameter(f"expected a name that ends in {', '.join(suffixes)}, got {str(path)!r}")
    if path is not None and not path.parent.is_dir():
        raise typer.BadParameter(f"no such directory: {path.parent}")
    return path


Checkpoint = Annotated[
    Path,
    typer.Argument(
        help="Checkpoint directory (config.json, *.safetensors, index), or a name such as"
        " moonshotai/Kimi-K2-Instruct-0905 that the Hugging Face cache holds.",
        metavar="CHECKPOINT",
    ),
]
Download = Annotated[bool, typer.Option("--download", help="Fetch what the Hugging Face cache lacks.")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of everything random.")]
KeepQuantized = Annotated[
    bool | None,
    typer.Option(
        "--keep-quantized/--dequantize",
        help="Hold FP8/INT4 weights as stored, as ranks always do: less memory, and fast on an H200 in BF16, where it"
        " is the default.",
        show_default=False,
    ),
]
ComputeDtype = Annotated[
    Dtype | None, typer.Option("--dtype", help="Compute dtype; bfloat16 on a GPU, else float32.", show_default=False)
]
Ranks = Annotated[
    Path | None,
    typer.Option(help="Weights: output of `convert --target cuda`, a rank a process of `torchrun --no-python`."),
]
TargetOption = Annotated[Target, typer.Option(help="neuron: NxDI's names and layouts; cuda: the checkpoint's own.")]
ExpertsOption = Annotated[
    str | None,
    typer.Option(
        callback=_known_experts,
        autocompletion=expert_names,
        metavar="FORMAT",
        help="Experts' format: per_channel (neuron's default), blockwise, bf16; stored (cuda's default).",
    ),
]
StoredFormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        callback=_known_format,
        autocompletion=format_names,
        metavar="FORMAT",
        help="How weights are stored (fp8, int4, bf16); the model's own if not given.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")]
KvCacheDtype = Annotated[
    Literal["auto", "bfloat16", "fp8", "fp8_e4m3"],
    typer.Option(help="Of the KV cache; auto: config.json's kv_cache_scheme, else the compute dtype."),
]
BatchInvariant = Annotated[
    bool,
    typer.Option("--batch-invariant", help="A sequence's logits have the same bits in any batch and in any chunks."),
]
ChunkSize = Annotated[int | None, number(1, "Prefill this many tokens at a time.")]
MaxNewTokens = Annotated[int, number(1, "Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Nucleus size in (0, 1].")]
TopK = Annotated[int, number(0, "Tokens to choose from; 0 for all.")]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", callback=_not_empty, help="End a reply before this text; may be repeated."),
]
System = Annotated[str | None, typer.Option("--system", help="System prompt, instead of a conversation's own.")]
Tools = Annotated[
    Path | None, typer.Option("--tools", help="Tool definitions, OpenAI-style JSON.", exists=True, dir_okay=False)
]
Thinking = Annotated[bool, typer.Option(help="Whether K2.5 and K2.6 reason before they answer.")]
Style = Annotated[
    Literal["instruct", "thinking", "k2.5"] | None,
    typer.Option("--style", help="Chat format; by default what the checkpoint's template or name says."),
]

Images = Annotated[
    list[Path] | None,
    typer.Option("--image", help="Picture that stands before the text of --prompt; may be repeated (K2.5 and newer)."),
]
Videos = Annotated[
    list[Path] | None,
    typer.Option("--video", help="Film that stands before the text, after the pictures; may be repeated."),
]

# -- the NxDI model --------------------------------------------------------------------------------------------------
Backend = Annotated[
    Literal["torch", "neuron"],
    typer.Option("--backend", help="torch: the plain model on --device; neuron: the NxDI model, see --compiled."),
]
Deployed = Annotated[str, typer.Option("--preset", help="Deployment in configs/, or a path to one (neuron).")]
DEFAULT_DEPLOYMENT = "trn2-tp64-ep1"
Compiled = Annotated[
    Path | None, typer.Option(help="What `kimi-k2 compile` wrote, to load on Trainium (neuron).", file_okay=False)
]
OnCpu = Annotated[
    bool,
    typer.Option("--on-cpu", help="NxD's CPU mode instead of --compiled (neuron); ranks are torchrun's processes."),
]
Context = Annotated[int, number(2, "With --on-cpu: tokens a sequence, prompt and reply.")]
DEFAULT_CONTEXT = 1024


def parse_layers(text: str | None, config: KimiK2Config) -> list[int] | None:
    """Numbers with commas between, each a layer of the model; None is all."""
    if text is None:
        return None
    try:
        chosen = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"layers: expected numbers with commas, got {text!r}") from None
    for layer in chosen:
        if not 0 <= layer < config.num_hidden_layers:
            raise typer.BadParameter(f"layers: {layer} is not in 0..{config.num_hidden_layers - 1}")
    return chosen
