"""`kimi-k2 rehearse`: a deployment's whole way on this machine, with a small model whose sizes the preset takes.

On one Trainium2 chip (`--on-device`): both forms of decode on its four logical cores, with what four of 64 ranks hold
of the real model, one dense and two MoE layers. Without a chip the same steps run at small widths on the CPU.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_k2.cli.command import Command
from kimi_k2.cli.options import DEFAULT_DEPLOYMENT, Preset, refuse
from kimi_k2.files import Json, replace_file
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
# Tiles hold 32 or 64 columns of an expert a rank, and want a wider hidden state than the experts; the router's product
# has 128 experts at a time.
TILES = {"moe_intermediate_size": 2048, "hidden_size": 2304, "n_routed_experts": 128}
ON_GPUS = {"moe_intermediate_size": 1024}  # eight ranks cut it at blocks of 128
TOWER = {"vt_num_attention_heads": 16, "vt_hidden_size": 256, "mm_hidden_size": 256}
REAL, RANKS = "/models/MODEL", "/presharded"
PLAIN, HELLO = "generate with the plain model", "-p Hello --max-new-tokens 8"
TOKENS = "--prompt-length 16 --steps 4"
# One chip has four logical cores at LNC=2; `like` of the preset of each form.
CORES, FORMS = 4, {"xla": "trn2-tp64-ep1", "layers": "trn2-tp64-ep1-nki-layers"}
LOGITS = "trn2-tp64-ep1", "bf16"  # compared with the CPU; FP8 a channel would be 2.6 % off by itself
DEVICE = Path("/dev/neuron0")
# What four of 64 ranks hold of the real widths, and the same small.
SLICE: dict[str, int] = {
    **SIZES, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "hidden_size": 7168, "intermediate_size": 1152, "moe_intermediate_size": 128, "n_routed_experts": 384,
    "num_hidden_layers": 3,
}  # fmt: skip
SMALL_SLICE = {**SLICE, "q_lora_rank": 128, "kv_lora_rank": 128, "hidden_size": 256, "n_routed_experts": 128}
# The kernel of whole layers has at most 128 columns of the residual a rank.
SLICES = {"xla": SLICE, "layers": {**SLICE, "hidden_size": 128 * CORES}}


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        name: of the step.
        line: behind `kimi-k2`, as a shell takes it.
        processes: that torchrun starts.
        skip: why it cannot run here.
        real: the same on the machine, where there is such a command.
        same: the step whose standard output this one's must equal.
    """

    name: str
    line: str
    processes: int = 1
    skip: str | None = None
    real: str = ""
    same: str | None = None


def small_config(preset: Deployment) -> KimiK2Config:
    """A member of the family, small, that the preset's ranks can share."""
    from kimi_k2.sharding.experts import expert_formats
    from kimi_k2.synthetic.config import TINY_VISION, tiny_config

    experts = expert_formats().get(preset.experts)
    on_gpus = preset.hardware.target == "cuda"
    sizes = {**SIZES, **(ON_GPUS if on_gpus else TILES if experts is not None and experts.tiles else {})}
    model = "kimi-k2.5" if preset.vision else "kimi-k2-instruct-0905"
    return tiny_config(model, vision={**TINY_VISION, **TOWER}, **sizes)


def _in(work: Path, *names: str) -> Iterator[str]:
    """Paths as a shell takes them."""
    return (shlex.quote(str(work / name)) for name in names)


def _missing() -> str | None:
    """Why what needs NxD cannot run here."""
    from kimi_k2.neuron import contrib

    absent = ", ".join(contrib.missing())
    return f"not importable here: {absent}" if absent else None


def neuron_steps(chosen: str, work: Path) -> Iterator[Step]:
    """Behind `verify` on the way to a trn2."""
    checkpoint, hlo, sweep = _in(work, "checkpoint", "hlo", "sweep")
    missing, on_cpu = _missing(), f"--backend neuron {chosen} --on-cpu"
    on_device = f"--backend neuron {chosen} --compiled {RANKS}"
    yield Step(
        "compile", f"compile {checkpoint} {chosen} --out {hlo} --hlo-only", skip=missing,
        real=f"kimi-k2 compile {REAL} {chosen} --out {RANKS}",
    )  # fmt: skip
    yield Step(
        "load and generate, TP2 x EP2", f"generate {checkpoint} {on_cpu} --max-model-len 128 {HELLO}", 4, missing,
        f'kimi-k2 generate {REAL} {on_device} -p "What is MLA?"', PLAIN,
    )  # fmt: skip
    lengths = "--output-lengths 4,8 --prompt-lengths 16 --runs 1"
    yield Step(
        "sweep, one rank", f"bench {checkpoint} {on_cpu} {lengths} --out {sweep}", 1, missing,
        f"kimi-k2 bench {REAL} {on_device}",
    )  # fmt: skip


def steps(name: str, preset: Deployment, work: Path) -> Iterator[Step]:
    """All of the way, first to last."""
    from kimi_k2.neuron.sdk import version_of

    checkpoint, ranks, golden = _in(work, "checkpoint", "ranks", "golden")
    chosen = f"--preset {shlex.quote(name)}"
    yield Step("plan", f"plan {checkpoint} {chosen}", real=f"kimi-k2 plan {REAL} {chosen}")
    yield Step("convert", f"convert {checkpoint} {ranks} {chosen}", real=f"kimi-k2 convert {REAL} {RANKS} {chosen}")
    yield Step("verify", f"verify {ranks}", real=f"kimi-k2 verify {RANKS}")
    yield Step(PLAIN, f"generate {checkpoint} {HELLO}")
    capture = f"kimi-k2 parity capture {REAL} /golden --greedy --layers 0,1,30,60"
    yield Step("parity capture", f"parity capture {checkpoint} {golden} {TOKENS}", real=capture)
    unfit, version = None, version_of("transformers")
    if version is None:
        unfit = "not importable here: transformers"
    elif int(version.partition(".")[0]) < 5:
        unfit = "needs transformers 5, which dequantizes FP8 on a CPU"
    yield Step("parity with transformers", f"parity compare {golden} {checkpoint}", skip=unfit)
    if preset.hardware.target == "neuron":
        yield from neuron_steps(chosen, work)
        return
    profile = f"torchrun --nproc-per-node {preset.tp_degree} --no-python kimi-k2 bench profile {REAL} {chosen}"
    yield Step("decode step", "", skip="needs its GPUs", real=f"{profile} --weights {RANKS}")
    yield Step("serve", "", skip="needs its GPUs", real=f"kimi-k2 serve {REAL}")


def chip_steps(work: Path, presets: dict[str, Path], *, device: bool) -> Iterator[Step]:
    """Of one chip, both forms in turn; without `device` lowered, and loaded in NxD's CPU mode."""
    source, golden, logits = _in(work, "checkpoint-xla", "golden", "logits")
    missing = _missing()
    yield Step("doctor", "doctor", skip=None if device else "the device's packages are not needed here")
    yield Step(PLAIN, f"generate {source} {HELLO}")
    yield Step("parity capture", f"parity capture {source} {golden} {TOKENS}")
    for form, file in presets.items():
        own = (f"checkpoint-{form}", f"ranks-{form}", f"graphs-{form}", f"sweep-{form}")
        checkpoint, ranks, graphs, sweep = _in(work, *own)
        chosen = f"--preset {shlex.quote(str(file))}"
        yield Step(f"{form}: plan", f"plan {checkpoint} {chosen}")
        yield Step(f"{form}: convert", f"convert {checkpoint} {ranks} {chosen}")
        yield Step(f"{form}: verify", f"verify {ranks}")
        how = f"--weights {ranks}" if device else "--hlo-only"
        yield Step(f"{form}: compile", f"compile {checkpoint} {chosen} --out {graphs} {how}", 1, missing)
        where = f"--compiled {graphs}" if device else "--on-cpu --max-model-len 128"
        running = f"{checkpoint} --backend neuron {chosen} {where}"
        yield Step(
            f"{form}: load and generate, TP{CORES}",
            f"generate {running} {HELLO}",
            1 if device else CORES,
            missing if device or form == "xla" else "its kernels are the device's",
        )  # fmt: skip; no `same`: FP8 a channel is 2.6 % off the checkpoint, which may choose another token
        yield Step(f"{form}: sweep", f"bench {running} --out {sweep}", 1, None if device else "no Neuron device")
    preset, ranks, graphs = _in(work, "chip-logits.yaml", "ranks-logits", "graphs-logits")
    judged = f"parity compare {golden} {source} --backend neuron --preset {preset} --out {logits}"
    if device:
        yield Step("logits: convert", f"convert {source} {ranks} --preset {preset}")
        kept = f"--weights {ranks} --capture-layers 0,1,2"
        yield Step("logits: compile", f"compile {source} --preset {preset} --out {graphs} {kept}", 1, missing)
        judged += f" --compiled {graphs} --dtype bfloat16"
    yield Step("logits beside the CPU", judged, 1, missing)


def rehearse(
    context: typer.Context,
    preset: Preset = DEFAULT_DEPLOYMENT,
    on_device: Annotated[
        bool,
        typer.Option("--on-device", help="Both forms of decode on one Trainium2 chip, measured if there is one."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Keep checkpoint, ranks, logs and report.json here.", file_okay=False)
    ] = None,
) -> None:
    """Go a deployment's whole way on this machine: a small model, every command, and the commands for the real one.

    Plans, converts and verifies at the preset's ranks; where NxD is importable also lowers its graphs, loads the model
    in NxD's CPU mode and sweeps. What cannot run here is skipped by name. Takes minutes; exit 1 if a step fails.
    """
    if on_device:
        refuse(context, "--on-device has presets of its own, of four cores", "preset")
    if out is None:
        with tempfile.TemporaryDirectory(prefix="kimi-k2-rehearsal-") as directory:
            _rehearse(preset, Path(directory), on_device, keep=False)
    else:
        out.mkdir(parents=True, exist_ok=True)
        _rehearse(preset, out, on_device, keep=True)


def _rehearse(name: str, work: Path, on_device: bool, *, keep: bool) -> None:
    from kimi_k2.plan.deployment import Deployment
    from kimi_k2.plan.measured import checksum
    from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
    from kimi_k2.synthetic.config import tiny_config

    begin, device = time.monotonic(), on_device and DEVICE.exists()
    files = {name: Path(name)}
    if on_device:
        files = {form: work / f"chip-{form}.yaml" for form in FORMS}
        for form, file in files.items():
            replace_file(file, _of_one_chip(FORMS[form]))
        like, experts = LOGITS
        replace_file(work / "chip-logits.yaml", f"{_of_one_chip(like)}experts: {experts}\n")
        sizes = SLICES if device else dict.fromkeys(FORMS, SMALL_SLICE)
        configs = {form: tiny_config("kimi-k2-instruct-0905", **sizes[form]) for form in FORMS}
        way = list(chip_steps(work, files, device=device))
    else:
        preset = Deployment.load(name)
        configs, way = {name: small_config(preset)}, list(steps(name, preset, work))
    for form, config in configs.items():
        directory = work / (f"checkpoint-{form}" if on_device else "checkpoint")
        size = write_synthetic_checkpoint(directory, config)
        say(f"wrote {directory.name}: {config.num_hidden_layers} layers of random weights, {size / 1e6:.0f} MB")
    results, outputs = list[Json](), dict[str, str]()
    for number, step in enumerate(way, 1):
        say(f"[{number}/{len(way)}] {step.name} ... ", nl=False)
        started = time.monotonic()
        result = f"skipped: {step.skip}" if step.skip else _run(step, work / f"step-{number}.log", outputs)
        seconds = time.monotonic() - started
        results.append({"step": step.name, "result": result, "seconds": round(seconds, 1)})
        say(result if step.skip else f"{result}, {seconds:.0f} s")
        if result.startswith("failed"):
            break
    real = [step.real for step in way if step.real]
    if keep:
        logits = work / "logits" / "parity.json"
        report = _report(configs, files, results, work if device else None) | {"real": real}
        report["logits"] = json.loads(logits.read_text()) if logits.is_file() else None
        replace_file(work / "report.json", json.dumps({**report, "checksum": checksum(report)}, indent=1))
        say(f"report: {work / 'report.json'}")
    say(f"{time.monotonic() - begin:.0f} s.")
    if real:
        say("\n".join(["The same with the real model, on the real machine:", *real]))
    if result.startswith("failed"):
        raise typer.Exit(1)


def _of_one_chip(like: str) -> str:
    return f"like: {like}\ntp_degree: {CORES}\nmoe_tp_degree: {CORES}\n"


def _report(
    configs: dict[str, KimiK2Config], files: dict[str, Path], results: list[Json], measured: Path | None
) -> Json:
    """Sizes, versions, steps, what is expected of each preset, and what the device took; None without one."""
    from kimi_k2.neuron import requirements
    from kimi_k2.plan.deployment import load_target
    from kimi_k2.plan.measured import REHEARSAL
    from kimi_k2.plan.report import make_answer

    plans = {name: make_answer(load_target(str(file), configs[name])) for name, file in files.items()}
    device, found = None, requirements.states()
    if measured is not None:
        sweeps = {name: measured / f"sweep-{name}" / "sweep.json" for name in files}
        device = {
            "sweeps": {name: json.loads(file.read_text()) for name, file in sweeps.items() if file.is_file()},
            "compile": {name: json.loads((measured / f"graphs-{name}" / "compile.json").read_text()) for name in files},
            "collectives": _collectives(measured / "collectives.json"),
        }
    return {
        "schema": REHEARSAL,
        "models": {name: config.model_dump(mode="json", include={*SLICE}) for name, config in configs.items()},
        "versions": {state.package: state.found for state in found if state.found},
        "steps": results,
        "expected": {
            name: {"tpot": plan["tpot"], "needed": plan["rank_memory"]["needed"]} for name, plan in plans.items()
        },
        "device": device,
    }


def _collectives(file: Path) -> list[Json] | None:
    """Rows of nccom-test over the chip's cores; None where it is not installed or fails."""
    if (program := shutil.which("nccom-test")) is None:
        return None
    sizes = ["-r", str(CORES), "-b", "1kb", "-e", "16mb", "-f", "4", "-d", "fp32"]
    done = subprocess.run([program, *sizes, "--report-to-json-file", str(file), "allr"], check=False)
    if done.returncode or not file.is_file():
        return None
    rows: list[Json] = json.loads(file.read_text())["results"]
    return rows


def _run(step: Step, log: Path, outputs: dict[str, str]) -> str:
    """What came of a step; its output goes to `log`, and of `generate` to `outputs` too."""
    command = [*KIMI, *shlex.split(step.line)]
    if step.processes > 1:
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(step.processes), "--no-python"]
        command = [sys.executable, *launch, *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    replace_file(log, f"{done.stdout}\n{done.stderr}")
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
    ("kimi-k2 rehearse --preset trn2-tp32-ep2 --out /tmp/rehearsal", "kimi-k2 rehearse --on-device --out /tmp/chip"),
)
