"""`kimi-k2 serve`: vLLM, with the flags that Kimi needs."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.options import DEFAULT_DEPLOYMENT, Checkpoint, Directory, Download, Preset, number, refuse, with_groups
from kimi_k2.terminal import say


@dataclass(frozen=True)
class Served:
    """How the model is served.

    Attributes:
        experts: w2_bf16: down_proj of INT4 experts dequantized, four times its bytes (not neuron).
        compiled: What `compile` wrote for it (neuron).
    """

    max_model_len: Annotated[int | None, number(2, "Tokens a sequence; on GPUs as many as fit, if not given.")] = None
    experts: Literal["stored", "w2_bf16"] = "stored"
    preset: Preset = DEFAULT_DEPLOYMENT
    compiled: Directory = None


@with_groups
def serve(
    context: typer.Context,
    checkpoint: Checkpoint,
    served: Served,
    extra: Annotated[
        list[str] | None, typer.Argument(help="vLLM's own flags, behind --, such as -- --port 9000.", metavar="FLAGS")
    ] = None,
    backend: Annotated[
        Literal["auto", "cpu", "cuda", "neuron"],
        typer.Option(help="auto: neuron where there are Neuron devices, cuda where there are GPUs, else cpu."),
    ] = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")] = False,
    download: Download = False,
) -> None:
    """Serve a checkpoint with vLLM: prints vLLM's command with the flags that Kimi needs, and becomes it.

    Parsers of tool calls and reasoning, tensor parallelism over the GPUs that are here, the longest context that the
    plan says fits beside the weights, the vision tower's mode. The server is vLLM's; this is its command line.
    """
    import torch

    from kimi_k2.checkpoint.hub import resolve_checkpoint
    from kimi_k2.engine.device import check_device
    from kimi_k2.serving.command import vllm_command

    if backend == "auto":
        devices = any(Path("/dev").glob("neuron[0-9]*"))
        backend = "neuron" if devices else "cuda" if torch.cuda.is_available() else "cpu"
    if backend != "neuron":
        refuse(context, f"goes with --backend neuron; here it is {backend}", "preset", "compiled")
    gpus = (0, 0)
    if backend == "cuda":
        check_device(backend)
        gpus = torch.cuda.device_count(), torch.cuda.get_device_properties(0).total_memory
    directory = resolve_checkpoint(checkpoint, download=download)
    command = vllm_command(directory, backend, gpus=gpus, extra=extra or (), **vars(served))
    say(command.line)
    sys.stdout.flush()
    if not dry_run:
        command.run()


COMMAND = Command(
    "serve",
    serve,
    "Deploy",
    (
        "kimi-k2 serve /models/Kimi-K2-Thinking",
        "kimi-k2 serve /models/Kimi-K2.5 --max-model-len 131072 -- --port 9000 --max-num-seqs 64",
        "kimi-k2 serve /models/Kimi-K2-Instruct-0905 --backend neuron --preset trn2-tp32-ep2 --compiled /presharded",
        "kimi-k2 serve /models/Kimi-K2-Instruct-0905 --backend neuron --preset trn2-native-tp4-ep16",
    ),
)
