"""`kimi-k2 parity capture` and `parity compare`."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kimi_k2.checkpoint.writer import write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.parallel.ranks import leave_ranks
from kimi_k2.parity.compare import TOLERANCES, compare
from kimi_k2.parity.golden import check_model, check_size, checkpoint_identity, load_golden, save_golden
from kimi_k2.parity.logits import random_tokens
from kimi_k2.parity.report import as_json, plot, print_report
from kimi_k2.parity.run import BACKENDS, run
from kimi_k2.parity.trace import Inputs, ParityError

console = Console()
parity = typer.Typer(
    name="parity",
    help="Compare two backends point by point and name the first module that diverges.",
    no_args_is_help=True,
)

Backend = Enum("Backend", {name: name for name in BACKENDS}, type=str)  # type: ignore[misc]
Dtype = Enum("Dtype", {name: name for name in TOLERANCES}, type=str)  # type: ignore[misc]
CPU, TRANSFORMERS, FLOAT32 = Backend("cpu"), Backend("transformers"), Dtype("float32")
Checkpoint = Annotated[Path, typer.Argument(help="Checkpoint directory.", metavar="CHECKPOINT")]
BackendOption = Annotated[Backend, typer.Option(help="Who runs the model.")]
RanksOption = Annotated[
    Path | None, typer.Option(help="Weights: output of `convert --target cuda`, under torchrun (cpu, cuda).")
]
DtypeOption = Annotated[Dtype, typer.Option(help="Compute dtype.")]


@parity.command("capture")
def capture(
    checkpoint: Checkpoint,
    golden: Annotated[Path, typer.Argument(help="Directory to write golden.safetensors and golden.json to.")],
    backend: BackendOption = CPU,
    dtype: DtypeOption = FLOAT32,
    prompt: Annotated[str | None, typer.Option(help="Text; random tokens if not given.")] = None,
    prompt_length: Annotated[int, typer.Option(min=1, help="Random tokens of the prompt.")] = 64,
    steps: Annotated[int, typer.Option(min=1, help="Forced decode tokens.")] = 16,
    greedy: Annotated[bool, typer.Option("--greedy", help="Force the model's own choices, not random tokens.")] = False,
    layers: Annotated[str | None, typer.Option(help="Layers to keep, e.g. 0,1,30,60; all if not given.")] = None,
    positions: Annotated[int, typer.Option(min=1, help="Last positions of the prompt to keep.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0,
    ranks: RanksOption = None,
) -> None:
    """Run a model and keep its logits and activations."""
    config = KimiK2Config.from_pretrained(checkpoint)
    if prompt is None:
        tokens = random_tokens(config.vocab_size, prompt_length, seed)
    else:
        from kimi_k2.tokenization.tokenizer import KimiTokenizer

        tokens = KimiTokenizer.from_pretrained(checkpoint).encode(prompt)
    inputs = Inputs(tokens, random_tokens(config.vocab_size, steps, seed + 1), _layers(layers, config), positions)
    check_size(config, inputs)
    trace = run(backend.value, checkpoint, inputs, dtype.value, greedy=greedy, ranks=ranks)
    if leave_ranks() > 0:
        return
    save_golden(golden, trace, config, backend.value, dtype.value, checkpoint)
    console.print(f"{len(trace.values)} points, {sum(v.nbytes for v in trace.values.values()) / 1e6:.1f} MB: {golden}")


def _layers(text: str | None, config: KimiK2Config) -> list[int] | None:
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


@parity.command("compare")
def compare_command(
    golden: Annotated[Path, typer.Argument(help="Directory that `capture` wrote.")],
    checkpoint: Checkpoint,
    backend: BackendOption = TRANSFORMERS,
    dtype: DtypeOption = FLOAT32,
    out: Annotated[Path | None, typer.Option(help="Directory for parity.json and parity.png.")] = None,
    ranks: RanksOption = None,
) -> None:
    """Replay a golden run's tokens on another backend; exit status 1 if it diverges."""
    expected = load_golden(golden)
    config = KimiK2Config.from_pretrained(checkpoint)
    for difference in check_model(expected, config):
        console.print(f"[yellow]configurations differ:[/yellow] {difference}", highlight=False)
    if checkpoint_identity(checkpoint) != expected.checkpoint:
        console.print("[yellow]other weights[/yellow] than in the golden run, or other files of the same ones")
    names = list(TOLERANCES)
    if {dtype.value, expected.dtype} - set(names):
        raise ParityError(f"golden run: dtype {expected.dtype!r}, expected one of {', '.join(names)}")
    coarser = max(dtype.value, expected.dtype, key=names.index)
    trace = run(backend.value, checkpoint, expected.trace.inputs, dtype.value, ranks=ranks)
    if leave_ranks() > 0:
        return
    result = compare(trace, expected.trace, config, coarser)
    print_report(result, console)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "parity.json", as_json(result))
        try:
            plot(result, out / "parity.png")
        except ModuleNotFoundError as error:
            # A Trainium host may have no matplotlib; a failed plot must not read as a divergence.
            console.print(f"[yellow]no plot:[/yellow] {error}", highlight=False)
    if not result.passed:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the command group to `kimi-k2`."""
    app.add_typer(parity)
