"""`kimi-k2 doctor`."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from kimi_k2.cli.command import Command
from kimi_k2.errors import ConfigError
from kimi_k2.terminal import new_console, say

Status = Literal["ok", "missing", "note"]
MARKS: dict[Status, str] = {
    "ok": "green",
    "missing": "yellow",
    "note": "cyan",
}
EXTRAS = ("", "parity", "test")
LIBRARIES = ("torch", "transformers", "triton", "compressed-tensors")


@dataclass(frozen=True)
class Finding:
    """A line: what was looked at, what was found, and what would be right if that is not."""

    name: str
    status: Status
    found: str
    expected: str = ""


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show what this machine has, what is missing, and which parts of the package run here; always exits 0."""
    findings = [*_python(), *_libraries(), *_cuda(), *_neuron(), *_room()]
    parts = _parts({finding.name for finding in findings if finding.status == "missing"})
    if as_json:
        listed = [{"name": name, "missing": missing} for name, missing in parts.items()]
        report = {"findings": [asdict(row) for row in findings], "parts": listed}
        say(json.dumps(report, indent=1))
        return
    from rich.text import Text

    console = new_console(soft_wrap=True)
    width = max(map(len, (*(row.name for row in findings), *parts))) + 2
    for finding in findings:
        expected = f" ({finding.expected})" if finding.expected else ""
        mark = (f"{finding.status:8}", MARKS[finding.status])
        console.print(Text.assemble(f"{finding.name:{width}}", mark, finding.found + expected))
    console.print("\nWhat runs here", style="bold")
    for name, missing in parts.items():
        known = ("needs", "yellow") if missing else ("yes", "green")
        console.print(Text.assemble(f"{name:{width}}", known, f" {', '.join(missing)}".rstrip()))


def _importable(name: str) -> bool:
    import importlib.util

    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # imported without a spec: the emulator in place of `nki`
        return False


def _python() -> Iterator[Finding]:
    import importlib.metadata
    import platform

    from kimi_k2.neuron.sdk import version_of

    if version_of("kimi-k2") is None:
        yield Finding("kimi-k2", "note", "runs from its source folder: what it requires is not known")
        return
    needed = importlib.metadata.metadata("kimi-k2")["Requires-Python"]
    enough = sys.version_info >= tuple(int(number) for number in re.findall(r"\d+", needed))
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("Python", "ok" if enough else "missing", version, "" if enough else f"expected {needed}")


def _libraries() -> Iterator[Finding]:
    """Our dependencies' versions beside those that pyproject.toml asks for; of the small ones only what is wrong."""
    import importlib.metadata

    from packaging.requirements import Requirement

    from kimi_k2.neuron.sdk import version_of

    needed: dict[str, Requirement] = {}
    texts = importlib.metadata.requires("kimi-k2") if version_of("kimi-k2") else None
    for text in texts or LIBRARIES:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in EXTRAS):
            needed.setdefault(requirement.name, requirement)
    for name, requirement in needed.items():
        version, optional = version_of(name), requirement.marker is not None
        wanted = f"works with {requirement.specifier}" if requirement.specifier else ""
        if version is None:
            if name in LIBRARIES or not optional:
                yield Finding(name, "missing", "not installed", wanted)
        elif not requirement.specifier.contains(version, prereleases=True):
            # What an extra asks for is its own need: our kernels run with the Triton that torch brings.
            yield Finding(name, "note" if optional else "missing", version, wanted)
        elif name in LIBRARIES:
            yield Finding(name, "ok", version)


def _cuda() -> Iterator[Finding]:
    import importlib.util
    import shutil
    import subprocess

    from kimi_k2.kernels.common.build import find_nvcc
    from kimi_k2.plan.machines import BLACKWELL

    if importlib.util.find_spec("torch") is None:
        return
    try:
        import torch
    except (ImportError, OSError) as error:  # a library of CUDA that is not there
        yield Finding("torch", "missing", f"cannot be imported: {error}")
        return
    build = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
    try:
        gpus = list(map(torch.cuda.get_device_properties, range(torch.cuda.device_count())))
    except RuntimeError as error:  # an older driver, or a GPU that another process has for itself
        gpus, build = [], str(error).partition("\n")[0]
    hopper = any((gpu.major, gpu.minor) == (9, 0) for gpu in gpus)
    names = ", ".join(f"{number} x {name}" for name, number in Counter(gpu.name for gpu in gpus).items())
    other = BLACKWELL if gpus and not hopper else ""
    yield Finding("Hopper GPU", "ok" if hopper else "missing", f"{names or 'none'}; {build}", other)
    nvcc = find_nvcc()
    if nvcc is None:
        hint = "pip install 'kimi-k2[cuda]'; Triton kernels run without it"
        yield Finding("nvcc", "missing", "not on PATH or under CUDA_HOME", hint)
        return
    try:
        told = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    except OSError as error:  # of another processor
        told = str(error)
    release = re.search(r"release ([\d.]+)", told)
    yield Finding("nvcc", "ok" if release else "missing", f"{release[1] if release else 'cannot be run'} at {nvcc}")
    if shutil.which("g++") is None:
        yield Finding("g++", "missing", "not on PATH", "nvcc needs a host compiler: apt-get install g++")


def _neuron() -> Iterator[Finding]:
    import shutil

    from kimi_k2.neuron import sdk
    from kimi_k2.neuron.requirements import states
    from kimi_k2.neuron.torch_native import plugin

    cores = sorted(Path("/dev").glob("neuron[0-9]*"))
    yield Finding("Neuron devices", "ok" if cores else "missing", f"{len(cores)}" if cores else "none")
    compiler = shutil.which("neuronx-cc")
    yield Finding("neuronx-cc", "ok" if compiler else "missing", compiler or "not on PATH")
    version = sdk.version_of("torch-xla")
    yield Finding("torch-xla", "ok" if version else "missing", version or "not installed")
    lines: tuple[sdk.Line, ...] = ("neuron", "vllm-neuron")
    shown: set[str] = set()
    for line in reversed(lines) if plugin.installed() else lines:
        try:
            release = sdk.release_here(line) or sdk.releases(line)[0]
        except ConfigError as error:
            yield Finding("constraints/", "missing", str(error))
            break
        for pinned in sdk.states(release):
            if pinned.package in shown or pinned.package == "transformers":  # `_libraries` has it
                continue
            shown.add(pinned.package)
            importable = _importable(pinned.package.replace("-", "_"))
            installed = pinned.found or ("importable, version unknown" if importable else "not installed")
            status: Status = (
                "ok" if pinned.fits else "note" if pinned.found or importable or pinned.system else "missing"
            )
            expected = "" if pinned.fits else f"Neuron SDK {release.name} has {pinned.expected}"
            name = f"{pinned.package} (package)" if pinned.package == "neuronx-cc" else pinned.package
            yield Finding(name, status, installed, expected)
    # What their source imports besides; docs/trainium.md has the recipe. `_libraries` reports torch and transformers.
    for state in states():
        if state.package in ("boto3", "torchvision", "protobuf", "tenacity", "scipy", "jax", "vllm", "vllm_neuron"):
            installed, why = state.found or "not installed", "" if state.fits else state.expected
            yield Finding(f"NxD: {state.package}", "ok" if state.fits else "note", installed, why)


def _room() -> Iterator[Finding]:
    import shutil

    import psutil

    memory = psutil.virtual_memory()
    free_space = f"{memory.available / 1e9:.0f} GB free of {memory.total / 1e9:.0f}, {os.cpu_count()} CPU cores"
    yield Finding("memory", "ok" if memory.available > 4e9 else "note", free_space, "`convert` takes about 2 GB")
    disk = shutil.disk_usage(".")
    free_space = f"{disk.free / 1e9:.0f} GB free in {Path.cwd()}"
    enough = "a published checkpoint takes 595 to 1030 GB, its conversion as much"
    yield Finding("disk", "ok" if disk.free > 2.1e12 else "note", free_space, enough)
    yield Finding("Hugging Face cache", *_cached())


def _cached() -> tuple[Status, str]:
    from huggingface_hub.constants import HF_HUB_CACHE

    names = [path.name.removeprefix("models--").replace("--", "/") for path in Path(HF_HUB_CACHE).glob("models--*")]
    kimi = sorted(name for name in names if "kimi" in name.lower())
    return ("ok", ", ".join(kimi)) if kimi else ("note", f"no Kimi checkpoint in {HF_HUB_CACHE}")


def _parts(missing: set[str]) -> dict[str, list[str]]:
    """By the package's parts, what of their needs is missing here."""
    from kimi_k2.neuron.torch_native import plugin

    if not plugin.installed():  # or NxDI's line of the same name
        missing = missing | {"vllm-neuron"}
    base = ["Python", "torch"]
    neuron = ["constraints/", "torch-xla", "neuronx-distributed", "neuronx-distributed-inference"]
    needs = {
        "generate, chat, convert, plan (CPU)": base,
        "parity with transformers": [*base, "transformers"],
        "fast decode on a GPU": [*base, "Hopper GPU", "triton", "nvcc", "g++"],
        "compile --hlo-only": [*base, *neuron],
        "compile for Trainium": [*base, *neuron, "torch-neuronx", "neuronx-cc"],
        "run on Trainium": [*base, *neuron, "torch-neuronx", "Neuron devices"],
        "serve on Trainium without NxDI": [
            *base,
            "vllm",
            "constraints/",
            "vllm-neuron",
            "libtorch-neuronx-lite",
            "Neuron devices",
        ],
    }
    return {name: [need for need in wanted if need in missing] for name, wanted in needs.items()}


COMMAND = Command(
    "doctor",
    doctor,
    "Run a model",
    ("kimi-k2 doctor --json",),
)
