"""`kimi-k2 parity capture`, `parity compare`, `parity tower` and `parity kernels`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.options import (
    BatchInvariant,
    Checkpoint,
    Count,
    Dtype,
    Ranks,
    Seed,
    parse_layers,
    refuse,
    with_groups,
)
from kimi_k2.files import make_output
from kimi_k2.terminal import new_console, say

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.parity.trace import Inputs, Trace

parity = typer.Typer(
    name="parity",
    help="Compare two backends point by point and name the first module that diverges.",
    no_args_is_help=True,
)

_TOWER = 1e-5  # relative L2 of a point
BackendOption = Annotated[Literal["cpu", "cuda", "neuron", "transformers"], typer.Option(help="Who runs the model.")]
DtypeOption = Annotated[Dtype, typer.Option("--dtype", help="Compute dtype.")]


@dataclass(frozen=True)
class Running:
    """Who runs the model, and how.

    Attributes:
        preset: Deployment, for its experts' format and parallelism (neuron).
        compiled: What `compile --capture-layers` wrote for it (neuron); else NxD's CPU mode.
    """

    backend: BackendOption = "cpu"
    dtype: DtypeOption = "float32"
    ranks: Ranks = None
    batch_invariant: BatchInvariant = False
    preset: str | None = None
    compiled: Path | None = None

    def __post_init__(self) -> None:
        if self.batch_invariant and self.backend not in ("cpu", "cuda"):
            raise typer.BadParameter(f"--batch-invariant is of the plain model (cpu, cuda), not of {self.backend}")

    def trace(self, checkpoint: Path, inputs: Inputs, *, greedy: bool = False) -> Trace | None:
        """What `parity.run.run` gives; None on other ranks than the first."""
        from kimi_k2.parallel.ranks import rank_number
        from kimi_k2.parity.run import run
        from kimi_k2.plan.deployment import Deployment

        preset = None if self.preset is None else Deployment.load(self.preset)
        trace = run(checkpoint=checkpoint, inputs=inputs, greedy=greedy, **vars(self) | {"preset": preset})
        return trace if self.ranks is None or rank_number() == 0 else None


@dataclass(frozen=True)
class Judged(Running):
    """The same of what is compared with a golden run."""

    backend: BackendOption = "transformers"


@dataclass(frozen=True)
class Fed:
    """Which tokens the model is fed, and what is kept.

    Attributes:
        prompt: Text; random tokens if not given.
        greedy: Force the model's own choices, not random tokens.
        layers: Layers to keep, e.g. 0,1,30,60; all if not given.
        prompt_length: Random tokens of the prompt.
        steps: Forced decode tokens.
    """

    prompt: str | None = None
    prompt_length: Count = 64
    steps: Count = 16
    greedy: bool = False
    layers: str | None = None
    seed: Seed = 0

    def inputs(self, context: typer.Context, checkpoint: Path, config: KimiK2Config) -> Inputs:
        """The tokens."""
        from kimi_k2.parity.logits import random_tokens
        from kimi_k2.parity.trace import Inputs, ParityError
        from kimi_k2.tokenization.tokenizer import KimiTokenizer

        length = self.prompt_length
        if self.prompt is not None:
            refuse(context, "goes with random tokens, not with --prompt", "prompt_length")
            tokens = KimiTokenizer.from_pretrained(checkpoint).encode(self.prompt)
            length = len(tokens)
        most = config.max_position_embeddings
        if not 1 <= length <= most - self.steps:
            raise ParityError(
                f"prompt of {length} tokens and {self.steps} steps: expected at least one token, and no more than"
                f" max_position_embeddings ({most}) together"
            )
        if self.prompt is None:
            tokens = random_tokens(config.vocab_size, length, self.seed)
        forced = random_tokens(config.vocab_size, self.steps, self.seed + 1)
        return Inputs(tokens, forced, parse_layers(self.layers, config))


@parity.command("capture")
@with_groups
def capture(
    context: typer.Context,
    checkpoint: Checkpoint,
    golden: Annotated[Path, typer.Argument(help="Directory to write golden.safetensors and golden.json to.")],
    running: Running,
    fed: Fed,
) -> None:
    """Run a model and keep its logits and activations."""
    from kimi_k2.checkpoint.hub import resolve_checkpoint
    from kimi_k2.config import KimiK2Config
    from kimi_k2.parity.golden import check_size, save_golden

    checkpoint = resolve_checkpoint(checkpoint)
    config = KimiK2Config.from_pretrained(checkpoint)
    inputs = fed.inputs(context, checkpoint, config)
    check_size(config, inputs)
    make_output(golden)
    trace = running.trace(checkpoint, inputs, greedy=fed.greedy)
    if trace is None:
        return
    save_golden(golden, trace, config, running.backend, running.dtype, checkpoint)
    say(f"{len(trace.values)} points, {sum(v.nbytes for v in trace.values.values()) / 1e6:.1f} MB: {golden}")


@parity.command("compare")
@with_groups
def compare_command(
    golden: Annotated[Path, typer.Argument(help="Directory that `capture` wrote.")],
    checkpoint: Checkpoint,
    running: Judged,
    out: Annotated[Path | None, typer.Option(help="Directory for parity.json.")] = None,
) -> None:
    """Replay a golden run's tokens on another backend; exit status 1 if it diverges."""
    from kimi_k2.checkpoint.hub import resolve_checkpoint
    from kimi_k2.checkpoint.writer import write_json
    from kimi_k2.config import KimiK2Config
    from kimi_k2.parity.compare import TOLERANCES, as_json, compare, print_report
    from kimi_k2.parity.golden import check_model, checkpoint_identity, load_golden
    from kimi_k2.parity.trace import ParityError

    console = new_console()
    expected = load_golden(golden)
    checkpoint = resolve_checkpoint(checkpoint)
    config = KimiK2Config.from_pretrained(checkpoint)
    for difference in check_model(expected, config):
        console.print(f"configurations differ: {difference}", style="yellow")
    if checkpoint_identity(checkpoint) != expected.checkpoint:
        console.print("other weights than in the golden run, or other files of the same ones", style="yellow")
    names, dtype = list(TOLERANCES), running.dtype
    if {dtype, expected.dtype} - set(names):
        raise ParityError(f"golden run: dtype {expected.dtype!r}, expected one of {', '.join(names)}")
    if out is not None:
        make_output(out)
    trace = running.trace(checkpoint, expected.trace.inputs)
    if trace is None:
        return
    result = compare(trace, expected.trace, config, max(dtype, expected.dtype, key=names.index))
    print_report(result, console)
    if out is not None:
        write_json(out / "parity.json", as_json(result))
    if not result.passed:
        raise typer.Exit(1)


@parity.command("tower")
def tower_command(
    checkpoint: Checkpoint,
    grids: Annotated[
        list[str] | None,
        typer.Option("--grid", help="Patches, HEIGHTxWIDTH or FRAMESxHEIGHTxWIDTH; may be repeated. 4x6, 2x2, 3x2x4."),
    ] = None,
    backend: Annotated[Literal["cpu", "cuda"], typer.Option("--backend", help="Who runs our tower.")] = "cpu",
    dtype: DtypeOption = "float32",
) -> None:
    """Compare the vision tower with transformers' point by point on random pixels; exit status 1 if it diverges."""
    import torch

    from kimi_k2.checkpoint.hub import resolve_checkpoint
    from kimi_k2.engine.device import check_device
    from kimi_k2.model.vision.model import VisionModel
    from kimi_k2.parity.reference import transformers_tower
    from kimi_k2.parity.vision import first_divergence, parse_grid, trace_plain, trace_transformers

    check_device(backend)
    checkpoint = resolve_checkpoint(checkpoint)
    sizes = [parse_grid(grid) for grid in grids or ("4x6", "2x2", "3x2x4")]
    model = VisionModel.from_pretrained(checkpoint, dtype=getattr(torch, dtype), device=backend)
    for grid in sizes:
        model.config.check_grid(grid)
    patch = model.config.patch_size
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(sum(grid.patches for grid in sizes), 3, patch, patch, generator=generator) * 2 - 1
    trace = trace_plain(model, pixels.to(backend), sizes)
    divergence = first_divergence(trace, trace_transformers(transformers_tower(checkpoint), pixels, sizes), _TOWER)
    console = new_console()
    if divergence is None:
        console.print(f"{len(trace)} points of the tower agree with transformers within {_TOWER:g}", style="green")
        return
    console.print(f"diverges first at {divergence.point}: relative L2 {divergence.relative_l2:.1e}", style="bold red")
    raise typer.Exit(1)


@parity.command("kernels")
def kernels_command(
    directory: Annotated[Path, typer.Argument(help="For the emulator's inputs and results; kept if they are there.")],
    model: Annotated[str, typer.Argument(help="Published configuration, whose sizes the kernels get.")] = (
        "kimi-k2-instruct-0905"
    ),
    cores: Annotated[int, typer.Option(min=1, max=2, help="Physical cores of a logical one (LNC).")] = 2,
) -> None:
    """Run each NKI kernel of a decode step here and on the emulator; exit status 1 if one differs."""
    from kimi_k2.parity.kernels import TOLERANCE, compare_kernels, recorded
    from nki_emulator import install

    recorded(directory, model, cores)
    where = "the emulator again: no nki is importable here" if install() else "nki"
    say(f"on {where}; relative L2 difference to the emulator, at most {TOLERANCE:g}:")
    passed = True
    for name, difference in compare_kernels(directory):
        same = difference <= TOLERANCE
        say(f"  {name:22} {difference:.1e} {'ok' if same else 'DIFFERS'}")
        passed = passed and same
    if not passed:
        raise typer.Exit(1)


COMMAND = Command(
    "parity",
    parity,
    "Measure and prove",
    (
        "kimi-k2 parity capture /models/Kimi-K2-Thinking /golden --layers 0,1,30,60",
        "kimi-k2 parity compare /golden /models/Kimi-K2-Thinking --backend transformers",
    ),
)
