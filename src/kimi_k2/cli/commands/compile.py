"""`kimi-k2 compile`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.errors import resumable
from kimi_k2.cli.options import DEFAULT_DEPLOYMENT, Directory, DraftTokens, Preset, parse_layers, refuse, with_groups
from kimi_k2.terminal import say


@dataclass(frozen=True)
class Graphs:
    """Which graphs, and how far.

    Attributes:
        capture_layers: Graphs for `parity --compiled`, which also return these layers' outputs, e.g. 0,1,30,60.
        dry_run: Print whether it fits, and stop.
        hlo_only: Write HLO text; needs NxD's source, no Neuron device.
        draft: Directory of an Eagle3 head, which drafts in the graph.
    """

    capture_layers: str | None = None
    draft: Directory = None
    draft_tokens: DraftTokens = 3
    dry_run: bool = False
    hlo_only: bool = False


@with_groups
def compile_model(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or a published name for --hlo-only.")],
    graphs: Graphs,
    preset: Preset = DEFAULT_DEPLOYMENT,
    out: Annotated[
        Path, typer.Option(help="Directory for NEFFs or HLO text and the manifest.", file_okay=False)
    ] = Path("compiled"),
    weights: Annotated[
        Path | None, typer.Option(help="Directory of `convert`'s files, linked into --out.", file_okay=False)
    ] = None,
) -> None:
    """Compile for Trainium: print whether it fits, then write a NEFF a graph (or its HLO text).

    A preset of vllm-neuron's torch-native line: prints the command by which vLLM compiles on this CPU, and becomes it.
    """
    from kimi_k2.config import KimiK2Config
    from kimi_k2.errors import ConfigError
    from kimi_k2.neuron import compile as job
    from kimi_k2.plan.deployment import Deployment
    from kimi_k2.plan.nxdi import draft_options

    if graphs.draft is None:
        refuse(context, "goes with --draft", "draft_tokens")
    if graphs.hlo_only or graphs.dry_run:
        refuse(context, "of compiled graphs: not with --hlo-only or --dry-run", "weights", "capture_layers")
    chosen = Deployment.load(preset)
    if chosen.hardware.target != "neuron":
        raise ConfigError(f"expected a Trainium deployment, {chosen.name} is for {chosen.instance}", field="preset")
    config = KimiK2Config.load(model)
    plan = job.check_fit(config, chosen, graphs.draft, graphs.draft_tokens)
    say(f"{chosen.name} on {chosen.instance}: {plan.verdict}")
    if chosen.torch_native is not None:
        others = ("capture_layers", "hlo_only", "weights", "draft")
        refuse(context, "vllm-neuron compiles this preset, and reads converted files as the model", *others)
        _compile_by_vllm(model, preset, out, dry_run=graphs.dry_run)
        return
    if graphs.dry_run:
        return
    options: dict[str, Any] = {}
    if graphs.draft is not None:
        options = {"draft": str(graphs.draft), **draft_options(graphs.draft_tokens)}
    if graphs.hlo_only:
        from kimi_k2.neuron import standins

        os.environ.setdefault("PJRT_DEVICE", "CPU")
        standins.install()
        with resumable():
            job.lower_all(chosen, model, out, say, **options)
    else:
        if graphs.capture_layers is not None:
            from kimi_k2.parity.nxdi import capture_options

            layers = parse_layers(graphs.capture_layers, config)
            options |= capture_options(config, layers, chosen.tp_degree)
        job.check_sdk()
        if weights is not None:
            job.take_weights(weights, out)
        with resumable():
            job.compile_all(chosen, model, out, say, **options)


def _compile_by_vllm(model: str, preset: str, out: Path, *, dry_run: bool) -> None:
    from kimi_k2.neuron import compile as job
    from kimi_k2.serving.command import compile_command

    command = compile_command(Path(model), preset, out)
    say(command.line)
    if not dry_run:
        job.check_sdk("vllm-neuron")
        sys.stdout.flush()
        command.run()


COMMAND = Command(
    "compile",
    compile_model,
    "Deploy",
    (
        "kimi-k2 compile /models/Kimi-K2-Instruct-0905 --preset trn2-tp32-ep2 --out /presharded",
        "kimi-k2 compile kimi-k2-instruct-0905 --preset trn2-tp32-ep2 --out /tmp/hlo --hlo-only",
        "kimi-k2 compile /models/Kimi-K2-Instruct-0905 --draft /models/head --out /presharded",
        "kimi-k2 compile /models/Kimi-K2-Instruct-0905 --preset trn2-native-tp32-ep2 --out /shared/neffs --dry-run",
    ),
)
