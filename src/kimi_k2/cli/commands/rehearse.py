"""`kimi-k2 rehearse`: a deployment's whole way on this machine, with a small model whose sizes the preset takes."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.options import DEFAULT_DEPLOYMENT, Preset
from kimi_k2.terminal import say

if TYPE_CHECKING:
    from kimi_k2.config import KimiK2Config
    from kimi_k2.plan.deployment import Deployment

KIMI = [sys.executable, "-c", "from kimi_k2.cli import main; main()"]
# Sizes that 64 ranks can share, as heads and the 320 rows of the down projections are; tiles want heads of 128.
SIZES: dict[str, int] = {
    "num_attention_heads": 64, "num_key_value_heads": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "q_lora_rank": 128, "kv_lora_rank": 128, "hidden_size": 256, "intermediate_size": 1024,
    "moe_intermediate_size": 64, "n_routed_experts": 24, "num_experts_per_tok": 8, "vocab_size": 1024,
    "num_hidden_layers": 2, "max_position_embeddings": 131072,
}  # fmt: skip
# Tiles hold 32 or 64 columns of an expert a rank, and want a wider hidden state than the experts.
TILES = {"moe_intermediate_size": 2048, "hidden_size": 2176}
ON_GPUS = {"moe_intermediate_size": 1024}  # eight ranks cut it at blocks of 128
TOWER = {"vt_num_attention_heads": 16, "vt_hidden_size": 256, "mm_hidden_size": 256}
REAL, RANKS = "/models/MODEL", "/presharded"


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of the step.
        words: behind `kimi-k2`.
        processes: that torchrun starts.
        skip: why it cannot run here.
        real: the same on the machine, where there is such a command.
        same: the step whose standard output this one's must equal.
    """

    name: str
    words: list[str]
    processes: int = 1
    skip: str | None = None
    real: str = ""
    same: str | None = None


def small_config(preset: Deployment) -> KimiK2Config:
    """A member of the family, small, that the preset's ranks can share."""
    from kimi_k2.sharding.experts.format import expert_formats
    from kimi_k2.synthetic.config import TINY_VISION, tiny_config

    made = expert_formats().get(preset.experts)
    on_gpus = preset.hardware.target == "cuda"
    sizes = {**SIZES, **(ON_GPUS if on_gpus else TILES if made is not None and made.tiles else {})}
    model = "kimi-k2.5" if preset.vision else "kimi-k2-instruct-0905"
    return tiny_config(model, vision={**TINY_VISION, **TOWER}, **sizes)


def neuron_steps(name: str, work: Path, absent: list[str]) -> Iterator[Step]:
    """Behind `verify` on the way to a trn2."""
    checkpoint, missing = str(work / "checkpoint"), f"not importable here: {', '.join(absent)}" if absent else None
    options = ["--backend", "neuron", "--preset", name]
    on_cpu = [*options, "--on-cpu", "--max-model-len", "128", "-p", "Hello", "--max-new-tokens", "8"]
    yield Step(
        "compile", ["compile", checkpoint, "--preset", name, "--out", str(work / "hlo"), "--hlo-only"], skip=missing,
        real=f"kimi-k2 compile {REAL} --preset {name} --out {RANKS}",
    )  # fmt: skip
    yield Step(
        "load and generate, TP2 x EP2", ["generate", checkpoint, *on_cpu], 4, missing,
        f'kimi-k2 generate {REAL} --backend neuron --preset {name} --compiled {RANKS} -p "What is MLA?"',
        "generate with the plain model",
    )  # fmt: skip
    lengths = ["--output-lengths", "4,8", "--prompt-lengths", "16", "--runs", "1", "--out", str(work / "sweep")]
    yield Step(
        "sweep, one rank", ["bench", checkpoint, *options, "--on-cpu", *lengths], 1, missing,
        f"kimi-k2 bench {REAL} --backend neuron --preset {name} --compiled {RANKS}",
    )  # fmt: skip


def steps(name: str, preset: Deployment, work: Path) -> Iterator[Step]:
    """All of the way, first to last."""
    import importlib.metadata

    from kimi_k2.neuron import contrib

    checkpoint, ranks, golden = (str(work / one) for one in ("checkpoint", "ranks", "golden"))
    yield Step("plan", ["plan", checkpoint, "--preset", name], real=f"kimi-k2 plan {REAL} --preset {name}")
    yield Step(
        "convert", ["convert", checkpoint, ranks, "--preset", name],
        real=f"kimi-k2 convert {REAL} {RANKS} --preset {name}",
    )  # fmt: skip
    yield Step("verify", ["verify", ranks], real=f"kimi-k2 verify {RANKS}")
    hello = ["-p", "Hello", "--max-new-tokens", "8"]
    yield Step("generate with the plain model", ["generate", checkpoint, *hello])
    layers = ["--prompt-length", "16", "--steps", "4"]
    yield Step(
        "parity capture", ["parity", "capture", checkpoint, golden, *layers],
        real=f"kimi-k2 parity capture {REAL} /golden --greedy --layers 0,1,30,60",
    )  # fmt: skip
    try:
        old = int(importlib.metadata.version("transformers").partition(".")[0]) < 5
        unfit = "needs transformers 5, which dequantizes FP8 on a CPU" if old else None
    except importlib.metadata.PackageNotFoundError:
        unfit = "not importable here: transformers"
    yield Step(
        "parity with transformers", ["parity", "compare", golden, checkpoint],
        skip=unfit,
    )  # fmt: skip
    if preset.hardware.target == "neuron":
        yield from neuron_steps(name, work, contrib.missing())
        return
    launch = f"torchrun --nproc-per-node {preset.tp_degree} --no-python"
    yield Step(
        "decode step", ["profile", checkpoint, "--preset", name, "--weights", ranks], skip="needs its GPUs",
        real=f"{launch} kimi-k2 profile {REAL} --preset {name} --weights {RANKS}",
    )  # fmt: skip
    yield Step("serve", [], skip="needs its GPUs", real=f"kimi-k2 serve {REAL}")


def rehearse(
    preset: Preset = DEFAULT_DEPLOYMENT,
    out: Annotated[
        Path | None, typer.Option(help="Keep checkpoint, ranks, logs and report.md here.", file_okay=False)
    ] = None,
) -> None:
    """Go a deployment's whole way on this machine: a small model, every command, and the commands for the real one.

    Plans, converts and verifies at the preset's ranks; where NxD is importable also lowers its graphs, loads the model
    in NxD's CPU mode and sweeps. What cannot run here is skipped by name. Takes minutes; exit 1 if a step fails.
    """
    if out is None:
        with tempfile.TemporaryDirectory(prefix="kimi-k2-rehearsal-") as directory:
            _rehearse(preset, Path(directory), keep=False)
    else:
        out.mkdir(parents=True, exist_ok=True)
        _rehearse(preset, out, keep=True)


def _rehearse(name: str, work: Path, *, keep: bool) -> None:
    from kimi_k2.plan.deployment import Deployment
    from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint

    preset, begin = Deployment.load(name), time.monotonic()
    config = small_config(preset)
    size = write_synthetic_checkpoint(work / "checkpoint", config)
    say(f"wrote a small {config.num_hidden_layers}-layer checkpoint that {name} takes: {size / 1e6:.0f} MB")
    way, results, outputs = list(steps(name, preset, work)), [], dict[str, str]()
    for number, step in enumerate(way, 1):
        say(f"[{number}/{len(way)}] {step.name} ... ", nl=False)
        started = time.monotonic()
        result = f"skipped: {step.skip}" if step.skip else _run(step, work / f"step-{number}.log", outputs)
        results.append((step.name, result, time.monotonic() - started))
        say(result if step.skip else f"{result}, {results[-1][2]:.0f} s")
        if result.startswith("failed"):
            break
    seconds = time.monotonic() - begin
    table = "\n".join(f"| {one} | {result} | {took:.0f} |" for one, result, took in results)
    real = "\n".join(step.real for step in way if step.real)
    report = f"# Rehearsal of {name}\n\n| step | result | seconds |\n|---|---|---|\n{table}\n\n```sh\n{real}\n```\n"
    if keep:
        (work / "report.md").write_text(report, encoding="utf-8")
        say(f"report: {work / 'report.md'}")
    say(f"{seconds:.0f} s. The same with the real model, on the real machine:\n{real}")
    if any(result.startswith("failed") for _, result, _ in results):
        raise typer.Exit(1)


def _run(step: Step, log: Path, outputs: dict[str, str]) -> str:
    """What came of a step; its output goes to `log`, and of `generate` to `outputs` too."""
    command: list[Any] = [*KIMI, *step.words]
    if step.processes > 1:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(step.processes), "--no-python"]
        command = [sys.executable, *launch, *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    log.write_text(f"{done.stdout}\n{done.stderr}", encoding="utf-8")
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        return f"failed with {done.returncode}: {''.join(last)}"
    outputs[step.name] = done.stdout.strip()
    if step.same and outputs[step.same] not in done.stdout:
        return f"failed: another text than '{step.same}'"
    return "ok, the same text" if step.same else "ok"


COMMAND = Command(
    "rehearse",
    rehearse,
    "Deploy",
    ("kimi-k2 rehearse --preset trn2-tp32-ep2 --out /tmp/rehearsal",),
)
