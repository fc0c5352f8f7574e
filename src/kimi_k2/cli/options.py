"""Options that several commands share: each an annotated type with its help, and groups of them as dataclasses.

One name has one meaning: `--backend` is who runs the model, `--prompt` a text, `--prompt-length` tokens. Lists of
numbers and of names have commas; texts and files are repeated.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from copy import copy
from dataclasses import Field, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from kimi_k2.limits import MOST

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config

Dtype = Literal["float32", "bfloat16", "float64"]
Target = Literal["neuron", "cuda"]


def published_models() -> list[str]:
    """Published configurations that the package carries."""
    from kimi_k2.config import published

    return published()


def expert_names() -> list[str]:
    """Formats of routed experts that `convert` writes."""
    from kimi_k2.sharding.experts import expert_formats
    from kimi_k2.sharding.layout import STORED, W2_BF16

    return [*expert_formats(), STORED, W2_BF16]


def format_names() -> list[str]:
    """Formats that a checkpoint is stored in."""
    from kimi_k2.quantization.stored import formats

    return list(formats())


def _named(known: Callable[[], list[str]], *names: str, metavar: str | None, text: str) -> Any:
    """An option that is one of some names, which are found when they are asked for."""

    def check(name: str | None) -> str | None:
        if name is not None and name not in known():
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(known())}")
        return name

    return typer.Option(*names, callback=check, autocompletion=known, metavar=metavar, help=text)


DEFAULT_MODEL, DEFAULT_DEPLOYMENT = "kimi-k2-instruct-0905", "trn2-tp32-ep2"
_PRESET = "Deployment: a file of configs/, or a path to one."
Preset = Annotated[str, typer.Option("--preset", help=_PRESET)]
Configuration = Annotated[str, typer.Argument(help="Published name, or a directory with config.json.")]
Model = Annotated[
    str, _named(published_models, "--model", metavar=None, text="Published configuration: names, YaRN, quantization.")
]


def number(least: int, text: str) -> Any:
    """An option that is a number of something."""
    return typer.Option(min=least, max=MOST, help=text)


# Of fields whose line in the docstring is their help.
Count = Annotated[int, typer.Option(min=1, max=MOST)]
OptionalCount = Annotated[int | None, typer.Option(min=1, max=MOST)]
Natural = Annotated[int, typer.Option(min=0, max=MOST)]
Listed = Annotated[str | None, typer.Option(metavar="A,B")]
Directory = Annotated[Path | None, typer.Option(file_okay=False)]


def _not_empty(texts: list[str] | None) -> list[str] | None:
    if texts is not None and not all(texts):
        raise typer.BadParameter("expected at least one character")
    return texts


def refuse(context: typer.Context, why: str, *names: str, but: tuple[str, ...] = ()) -> None:
    """Refuse parameters that stand on the command line and that this call would not look at.

    Args:
        context: of the call.
        why: what the error says.
        names: of the function's parameters; without any all.
        but: parameters that the call looks at.

    Raises:
        BadParameter: naming those that are there.
    """
    lonely = [
        parameter.opts[0] if parameter.opts[0].startswith("-") else parameter.opts[0].upper()
        for parameter in context.command.params
        if parameter.name is not None and (parameter.name in names if names else parameter.name not in but)
        if (source := context.get_parameter_source(parameter.name)) is not None and source.name == "COMMANDLINE"
    ]
    if lonely:
        raise typer.BadParameter(why, param_hint=", ".join(lonely))


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
        rich_help_panel="How the model runs",
        help="Hold FP8/INT4 weights as stored, as ranks always do: less memory, and fast on an H200 in BF16, where it"
        " is the default.",
        show_default=False,
    ),
]
Ranks = Annotated[
    Path | None,
    typer.Option(help="Weights: output of `convert --target cuda`, a rank a process of `torchrun --no-python`."),
]
TargetOption = Annotated[Target, typer.Option(help="neuron: NxDI's names and layouts; cuda: the checkpoint's own.")]
EXPERTS: dict[Target, str] = {"neuron": "blockwise", "cuda": "stored"}  # where nothing says it
_EXPERTS = "Experts' format (per_channel, bf16, w2_bf16 ...); if not given, " + ", ".join(
    f"{name} on {target}" for target, name in EXPERTS.items()
)
ExpertsOption = Annotated[str | None, _named(expert_names, "--experts", metavar="FORMAT", text=_EXPERTS)]
_STORED = "How weights are stored (fp8, int4, bf16); the model's own if not given."
StoredFormatOption = Annotated[str | None, _named(format_names, "--format", metavar="FORMAT", text=_STORED)]
DraftTokens = Annotated[int, typer.Option(min=1, max=64, help="With --draft: tokens drafted at a time.")]
KvCacheDtype = Annotated[
    Literal["auto", "bfloat16", "fp8", "fp8_e4m3"],
    typer.Option(help="Of the KV cache; auto: config.json's kv_cache_scheme, else the compute dtype."),
]
BatchInvariant = Annotated[
    bool,
    typer.Option("--batch-invariant", help="A sequence's logits have the same bits in any batch and in any chunks."),
]
System = Annotated[str | None, typer.Option("--system", help="System prompt, instead of a conversation's own.")]
Tools = Annotated[
    Path | None, typer.Option("--tools", help="Tool definitions, OpenAI-style JSON.", exists=True, dir_okay=False)
]
Thinking = Annotated[bool, typer.Option(help="Whether K2.5 and K2.6 reason before they answer.")]
PreserveThinking = Annotated[
    bool | None,
    typer.Option(
        "--preserve-thinking/--drop-thinking",
        help="Keep the reasoning of all turns (K2.6 and newer); by default as the member has it, on for K2.7-Code.",
    ),
]
Style = Annotated[
    Literal["instruct", "thinking", "k2.5", "k2.7"] | None,
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

# -- groups ----------------------------------------------------------------------------------------------------------
BackendName = Literal["cpu", "cuda", "neuron"]

SAMPLING, MODEL, NEURON = "How tokens are chosen", "How the model runs", "The NxDI model (--backend neuron)"


def _in(panel: str, *names: str, **options: Any) -> Any:
    return typer.Option(*names, rich_help_panel=panel, **options)


def _sampled(otherwise: str, text: str, *names: str, **options: Any) -> Any:
    """An option of generation_config.json's; `otherwise` where neither says it."""
    return _in(SAMPLING, *names, help=text, show_default=f"generation_config.json, else {otherwise}", **options)


@dataclass(frozen=True)
class ChatSampling:
    """How tokens are chosen; names and meanings of vLLM and Hugging Face. None is what generation_config.json says."""

    max_new_tokens: Annotated[
        int | None,
        _sampled("128; 1024 in chat", "Tokens at most.", "--max-new-tokens", "--max-tokens", min=1, max=MOST),
    ] = None
    temperature: Annotated[float | None, _sampled("0; 0.6 in chat", "0 is greedy.", min=0.0)] = None
    top_p: Annotated[float | None, _sampled("1", "Nucleus size in (0, 1].")] = None
    seed: Annotated[int, _in(SAMPLING, min=0, max=2**63 - 1, help="Of the random choices.")] = 0

    def chosen(self, **more: Any) -> dict[str, Any]:
        """Fields of SamplingParams that win over generation_config.json."""
        own = vars(self) | more
        return {name: value for name, value in own.items() if value is not None and name != "stop"}


@dataclass(frozen=True)
class SamplingOptions(ChatSampling):
    """All of them."""

    min_tokens: Annotated[int | None, _sampled("0", "Tokens of a reply at least.", min=0, max=MOST)] = None
    top_k: Annotated[int | None, _sampled("0", "Tokens to choose from; 0 for all.", min=0, max=MOST)] = None
    min_p: Annotated[float | None, _sampled("0", "Least share of the likeliest token's probability; 0 for all.")] = None
    repetition_penalty: Annotated[float | None, _sampled("1", "Of tokens in the prompt or the reply; 1 for none.")] = (
        None
    )
    presence_penalty: Annotated[float, _in(SAMPLING, help="Of tokens in the reply; 0 for none.")] = 0.0
    frequency_penalty: Annotated[float, _in(SAMPLING, help="Times how often a token is in the reply.")] = 0.0
    stop: Annotated[
        list[str] | None, _in(SAMPLING, callback=_not_empty, help="End a reply before this text; may be repeated.")
    ] = None


@dataclass(frozen=True)
class RunOptions:
    """Who runs the model, and how."""

    backend: Annotated[
        BackendName, _in(MODEL, help="cpu and cuda: the plain model with our kernels; neuron: the NxDI model.")
    ] = "cpu"
    dtype: Annotated[
        Dtype | None, _in(MODEL, help="Compute dtype; bfloat16 on a GPU, else float32.", show_default=False)
    ] = None
    keep_quantized: KeepQuantized = None
    kv_cache_dtype: KvCacheDtype = "auto"
    batch_invariant: BatchInvariant = False
    preset: Annotated[str, _in(NEURON, help=_PRESET)] = DEFAULT_DEPLOYMENT
    compiled: Annotated[
        Path | None, _in(NEURON, help="What `kimi-k2 compile` wrote, to load on Trainium.", file_okay=False)
    ] = None
    on_cpu: Annotated[
        bool, _in(NEURON, "--on-cpu", help="NxD's CPU mode instead of --compiled; ranks are torchrun's processes.")
    ] = False

    def opening(self, context: typer.Context, *plain: str, length: int, batch_size: int = 1) -> dict[str, Any]:
        """Options of `KimiK2.open`.

        Args:
            context: of the call.
            plain: parameters of the command that the plain model alone takes, beside those of all commands.
            length, batch_size: tokens a sequence and sequences, of NxD's CPU mode.

        Raises:
            BadParameter: naming options of another backend.
        """
        own = {name: value for name, value in vars(self).items() if name not in _OF_NEURON}
        if self.backend != "neuron":
            refuse(context, "goes with --backend neuron", *_OF_NEURON)
            return own
        ours = ("batch_invariant", "keep_quantized", "kv_cache_dtype", "ranks")
        refuse(context, "of the plain model, not of --backend neuron", *ours, *plain)
        from kimi_k2.api import Neuron

        return {**own, "neuron": Neuron(self.preset, self.compiled, self.on_cpu, length, batch_size)}


_OF_NEURON = ("preset", "compiled", "on_cpu", "max_model_len")


@dataclass(frozen=True)
class ModelOptions(RunOptions):
    """The same, and what drafts."""

    draft: Annotated[
        str | None,
        _in(MODEL, metavar="HEAD", help="Eagle3 head (directory or name) or ngram that drafts tokens to verify."),
    ] = None
    draft_tokens: DraftTokens = 3
    draft_layers: Annotated[
        Literal["auto", "inputs", "outputs"],
        _in(MODEL, help="With --draft: what the head's layer ids count; auto: outputs if they begin with 1."),
    ] = "auto"
    download: Download = False
    max_model_len: Annotated[
        int, _in(NEURON, min=2, max=MOST, help="With --on-cpu: tokens a sequence, prompt and reply.")
    ] = 1024

    def options(self, context: typer.Context, batch_size: int = 1) -> dict[str, Any]:
        """Of `KimiK2.open`.

        Raises:
            BadParameter: options of one backend with another, or of drafts without --draft.
        """
        opening = self.opening(context, "draft_layers", length=self.max_model_len, batch_size=batch_size)
        if self.compiled is not None:
            refuse(context, "the compiled graphs say it", "dtype", "max_model_len")
        if self.draft is None:
            refuse(context, "goes with --draft", "draft_layers", "draft_tokens")
        if self.backend == "neuron" and self.draft == "ngram":
            raise typer.BadParameter("--draft ngram goes with --backend cpu or cuda; NxDI drafts with a head")
        return opening


_LINE = re.compile(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)
_ANNOTATED: Any = Annotated


def _option(group: type, field: Field[Any], hint: Any) -> Any:
    """A field's type, with its line in the class's docstring as the option's help; a switch has no form that ends it.

    As a command's help is its docstring. Fields without a line say themselves what they are.
    """
    lines = dict(_LINE.findall("\n".join(inspect.cleandoc(base.__doc__ or "") for base in group.__mro__)))
    if field.name not in lines:
        return hint
    names = [f"--{field.name.removeprefix('as_').replace('_', '-')}"] if field.default is False else []
    kind, option = get_args(hint) if get_origin(hint) is Annotated else (hint, typer.Option(*names))
    option = copy(option)
    option.help = " ".join(lines[field.name].split())
    return _ANNOTATED[kind, option]


def with_groups(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are such dataclasses are options, one a field."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    spread: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in groups:
            spread.append(parameter.replace(annotation=hints[parameter.name], kind=parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(groups[parameter.name], include_extras=True)
        spread += [
            inspect.Parameter(
                field.name, parameter.KEYWORD_ONLY, default=field.default,
                annotation=_option(groups[parameter.name], field, types[field.name]),
            )
            for field in fields(groups[parameter.name])
        ]  # fmt: skip

    @functools.wraps(function)
    def call(**options: Any) -> None:
        values = {
            name: group(**{field.name: options.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        function(**options, **values)

    call.__signature__ = inspect.Signature(spread)  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in spread}
    return call


def listed(text: str | None) -> list[str]:
    """The names of a list with commas; none of None."""
    return [] if text is None else [name.strip() for name in text.split(",")]


def listed_numbers(text: str | None, option: str, least: int = 1) -> list[int]:
    """The numbers of a list with commas; none of None.

    Raises:
        BadParameter: one is no number, or below `least`.
    """
    try:
        numbers = [int(number) for number in listed(text)]
    except ValueError:
        raise typer.BadParameter(f"expected numbers with commas, got {text!r}", param_hint=option) from None
    if any(not least <= number <= MOST for number in numbers):
        raise typer.BadParameter(f"expected numbers of at least {least}, got {text!r}", param_hint=option)
    return numbers


def parse_layers(text: str | None, config: KimiK2Config) -> list[int] | None:
    """Numbers with commas between, each a layer of the model; None is all."""
    if text is None:
        return None
    chosen = listed_numbers(text, "layers", 0)
    for layer in chosen:
        if layer >= config.num_hidden_layers:
            raise typer.BadParameter(f"layers: {layer} is not in 0..{config.num_hidden_layers - 1}")
    return chosen
