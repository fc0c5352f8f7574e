"""The `kimi-k2` command."""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from kimi_k2.bench.backend import check_device
from kimi_k2.checkpoint.names import EXPERT, expected_tensors
from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.checkpoint.synthetic import TINY, Format, tiny_config, with_format, write_synthetic_checkpoint
from kimi_k2.config import PRESET_DIR, KimiK2Config
from kimi_k2.convert_cli import ExpertsOption, TargetOption, make_layout, print_sharding
from kimi_k2.engine.generate import Step
from kimi_k2.engine.generator import Generator
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.errors import KimiK2Error
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parallel.ranks import load_ranks
from kimi_k2.progress import ByteProgress
from kimi_k2.tokenization.chat import ChatStyle
from kimi_k2.tokenization.eos import load_eos_token_ids
from kimi_k2.tokenization.tokenizer import KimiTokenizer

app = typer.Typer(
    name="kimi-k2",
    help="Run, prove and plan Moonshot's Kimi-K2 family. Start with `kimi-k2 demo`: it needs no weights and no GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

PRESETS = sorted(path.stem for path in PRESET_DIR.glob("*.json"))
Preset = Enum("Preset", {name: name for name in PRESETS}, type=str)  # type: ignore[misc]
DEFAULT_PRESET = Preset("kimi-k2-instruct-0905")


class Dtype(str, Enum):
    """Compute dtypes of the plain model."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float64 = "float64"


class FormatOption(str, Enum):
    """Weight formats of a synthetic checkpoint."""

    fp8 = "fp8"
    int4 = "int4"
    bf16 = "bf16"


CheckpointArgument = Annotated[
    Path, typer.Argument(help="Checkpoint directory: config.json, *.safetensors, index.", metavar="CHECKPOINT")
]


def load_model(checkpoint: Path, **options: Any) -> KimiK2ForCausalLM:
    """`KimiK2ForCausalLM.from_pretrained` with a progress bar."""
    with CheckpointReader(checkpoint, KimiK2Config.from_pretrained(checkpoint).tensor_prefix) as reader:
        total = reader.total_bytes
    with ByteProgress("loading", total) as bar:
        return KimiK2ForCausalLM.from_pretrained(checkpoint, on_tensor=lambda _, count: bar.advance(count), **options)


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="Keep the checkpoint and report here instead of a temporary directory.")
    ] = None,
    preset: Annotated[Preset, typer.Option(help="Published configuration to shrink.")] = DEFAULT_PRESET,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode.")] = 32,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Write a small synthetic checkpoint, run it and prove it against transformers.

    Writes an FP8 (for Thinking and K2.5: INT4) checkpoint in the real Hugging Face layout, streams it in, prefills a
    chat prompt, decodes with the compressed cache and compares every logit with transformers. Exits 1 if they differ
    by more than 1e-5.
    """
    from kimi_k2.demo import run_demo

    raise typer.Exit(run_demo(out, preset.value, new_tokens, seed))


@app.command()
def generate(
    checkpoint: CheckpointArgument,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="User message; repeat for a batch.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Feed the text as it is, without the chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus size in (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Tokens to choose from; 0 for all.")] = 0,
    seed: Annotated[int, typer.Option(help="Of the random choice.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Compute dtype.")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu",
    keep_quantized: Annotated[
        bool,
        typer.Option(
            "--keep-quantized",
            help="Hold FP8/INT4 weights as stored, as ranks always do: less memory; with BF16 on an H200 fast.",
        ),
    ] = False,
    chunk_size: Annotated[int | None, typer.Option(min=1, help="Prefill this many tokens at a time.")] = None,
    ranks: Annotated[
        Path | None,
        typer.Option(help="Weights: output of `convert --target cuda`, a rank a process of `torchrun --no-python`."),
    ] = None,
) -> None:
    """Generate text from a checkpoint; tokens appear as they are made (one prompt) or at the end (several).

    With --ranks CHECKPOINT gives the configuration and the tokenizer only, and rank 0 prints.
    """
    if ranks is not None and not prompt:
        raise typer.BadParameter("--ranks needs --prompt, as input reaches one process only")
    prompts = prompt or [sys.stdin.read()]
    config = KimiK2Config.from_pretrained(checkpoint)
    tokenizer = KimiTokenizer.from_pretrained(checkpoint)
    params = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        eos_token_ids=load_eos_token_ids(checkpoint, config),
    )
    encoded = [encode_prompt(tokenizer, config, text, raw=raw) for text in prompts]
    compute = getattr(torch, dtype.value)
    if ranks is None:
        check_device(device)
        generator = Generator(load_model(checkpoint, dtype=compute, device=device, keep_quantized=keep_quantized))
        print_steps(generator.stream(encoded, params, chunk_size=chunk_size), tokenizer, params, len(prompts))
        return
    with load_ranks(ranks, config, compute, device) as part:
        steps = part.generator.stream(encoded, params, chunk_size=chunk_size)
        if part.number == 0:
            print_steps(steps, tokenizer, params, len(prompts))
        else:
            for _ in steps:
                pass


def print_steps(steps: Iterable[Step], tokenizer: KimiTokenizer, params: SamplingParams, sequences: int) -> None:
    """Text as it is made, or of several sequences at the end; then TTFT and TPOT on standard error."""
    decoders = [tokenizer.incremental_decoder() for _ in range(sequences)]
    texts = ["" for _ in range(sequences)]
    seconds = []
    for step in steps:
        seconds.append(step.seconds)
        for row, token in enumerate(step.tokens):
            if token is not None and token not in params.eos_token_ids:
                piece = decoders[row].feed(token)
                texts[row] += piece
                if sequences == 1:
                    typer.echo(piece, nl=False)
    for row, decoder in enumerate(decoders):
        rest = decoder.flush()
        if sequences == 1:
            typer.echo(rest)
        else:
            typer.echo(f"--- {row}\n{texts[row]}{rest}")
    tpot = sum(seconds[1:]) / max(len(seconds) - 1, 1)
    typer.echo(f"TTFT {seconds[0]:.3f} s, TPOT {tpot:.4f} s, {len(seconds)} steps", err=True)


def encode_prompt(tokenizer: KimiTokenizer, config: KimiK2Config, text: str, *, raw: bool = False) -> list[int]:
    """Token ids of a user message in the checkpoint's chat template, or of the bare text."""
    if raw:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}], style=ChatStyle.for_config(config))


@app.command("make-checkpoint")
def make_checkpoint(
    out: Annotated[Path, typer.Argument(help="Directory to write; must be empty or hold the same unfinished run.")],
    preset: Annotated[
        Preset, typer.Option(help="Published configuration: names, YaRN, quantization.")
    ] = DEFAULT_PRESET,
    fmt: Annotated[
        FormatOption | None, typer.Option("--format", help="fp8, int4 or bf16; the preset's own if not given.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Start from the published sizes instead of the tiny ones.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=NUMBER", help="Override a config field, e.g. num_hidden_layers=4."),
    ] = None,
    shards: Annotated[int | None, typer.Option(min=1, help="Number of shard files; one a layer if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Write a synthetic checkpoint in the exact Hugging Face format, from a few MB to tens of GB, in a stream."""
    changes = dict(_parse_override(text) for text in overrides or [])
    config = KimiK2Config.from_preset(preset.value, **changes) if full else tiny_config(preset.value, **changes)
    if fmt is not None:
        config = with_format(config, fmt_literal(fmt))
    total = sum(spec.nbytes for spec in expected_tensors(config))
    with ByteProgress("writing", total) as bar:
        write_synthetic_checkpoint(
            out, config, seed=seed, shards=shards, on_tensor=lambda spec: bar.advance(spec.nbytes)
        )
    typer.echo(f"wrote {total / 1e9:.3f} GB of tensors to {out}")


def fmt_literal(fmt: FormatOption) -> Format:
    """The Literal that `with_format` takes."""
    literals: dict[str, Format] = {"fp8": "fp8", "int4": "int4", "bf16": "bf16"}
    return literals[fmt.value]


def _parse_override(text: str) -> tuple[str, int | float]:
    field, _, value = text.partition("=")
    if field not in KimiK2Config.model_fields:
        raise typer.BadParameter(f"unknown field '{field}'; tiny defaults exist for: {', '.join(TINY)}")
    try:
        return field, int(value)
    except ValueError:
        try:
            return field, float(value)
        except ValueError:
            raise typer.BadParameter(f"{field}: expected a number, got {value!r}") from None


@app.command()
def inspect(
    checkpoint: CheckpointArgument,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor with its shard.")] = False,
    tp: Annotated[int | None, typer.Option(min=1, help="Show how `convert --tp` would cut it instead.")] = None,
    ep: Annotated[int, typer.Option(min=1, help="With --tp: groups that the experts are divided among.")] = 1,
    target: Annotated[TargetOption, typer.Option(help="With --tp: whose names and layouts.")] = TargetOption.neuron,
    experts: Annotated[ExpertsOption | None, typer.Option(help="With --tp: the experts' format.")] = None,
    layer: Annotated[int, typer.Option(help="With --tp: the layer; -1 for embedding, norm and head.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="With --tp: all layers, as JSON.")] = False,
) -> None:
    """Check a checkpoint's headers against its config.json and show what it holds, without reading weights.

    With --tp: which slice of which tensor goes to which rank; a published model's name will do for that.
    """
    if tp is not None:
        layout = make_layout(tp, ep, target, experts, None)
        print_sharding(KimiK2Config.load(checkpoint), layout, layer, as_json)
        return
    config = KimiK2Config.from_pretrained(checkpoint)
    reader = CheckpointReader.for_config(checkpoint, config)
    console = Console()
    if tensors:
        table = Table("tensor", "dtype", "shape", "MB", "shard")
        for name in reader.names():
            stored = reader.tensors[name]
            shape = "x".join(map(str, stored.shape))
            table.add_row(
                name, str(stored.dtype).removeprefix("torch."), shape, f"{stored.nbytes / 1e6:.3f}", stored.shard
            )
        console.print(table)
    sizes: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for name, stored in reader.tensors.items():
        count, size = sizes[_category(name)]
        sizes[_category(name)] = (count + 1, size + stored.nbytes)
    summary = Table("part", "tensors", "GB", title=f"{checkpoint} ({len(reader.index.shards)} shards)")
    for category, (count, size) in sizes.items():
        summary.add_row(category, f"{count:,}", f"{size / 1e9:.3f}")
    summary.add_row("all", f"{len(reader.tensors):,}", f"{reader.total_bytes / 1e9:.3f}", style="bold")
    console.print(summary)
    quantization = config.quantization.quant_method if config.quantization else "none"
    console.print(
        f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, {config.n_routed_experts} experts top-"
        f"{config.num_experts_per_tok}, cache {config.cache_dim} values a token a layer, quantization {quantization}"
    )


def _category(name: str) -> str:
    if EXPERT.match(name):
        return "routed experts"
    for part, category in (
        ("self_attn", "attention"),
        ("shared_experts", "shared experts"),
        ("mlp.gate.", "router"),
        ("mlp.", "dense MLP"),
        ("norm", "norms"),
    ):
        if part in name:
            return category
    return "embedding and lm_head"


# Command groups of other parts of the package, each a module with `register(app)`.
for _module in ("kimi_k2.convert_cli", "kimi_k2.tools_cli", "kimi_k2.parity_cli"):
    if importlib.util.find_spec(_module):
        importlib.import_module(_module).register(app)


def run(command: Callable[..., Any]) -> None:
    """Run one command function as a program of its own (the files in scripts/)."""
    main(lambda: typer.run(command))


def main(command: Callable[[], Any] = app) -> None:
    """Run the command; expected errors are one line on standard error and exit status 1."""
    try:
        command()
    except KimiK2Error as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
