"""SDK releases whose packages work together, as constraints/ pins them, and how this machine differs.

Files are named by what runs the model: neuron-*.txt are NxDI's, vllm-neuron-*.txt those of vllm-neuron's torch-native
line, which has no NxDI.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.version import Version

from kimi_k2.errors import ConfigError

CONSTRAINTS = Path(str(files("kimi_k2"))) / "neuron" / "constraints"  # a link to the repository's constraints/
NXDI = "neuronx-distributed-inference"
VLLM_NEURON = "vllm-neuron"
TESTED = "2.29"  # whose NxD and NxDI source test/nxd runs on
Line = Literal["neuron", "vllm-neuron"]
_SYSTEM = re.compile(r"^# apt: (\S+)==(\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Release:
    """One release: Python packages with what is asked of them, and Debian or RPM packages with their versions.

    Attributes:
        file: constraints/ has it under this name.
    """

    name: str
    file: str
    python: tuple[Requirement, ...]
    system: dict[str, str]


@dataclass(frozen=True)
class State:
    """A package of a release on this machine.

    Attributes:
        found: its version here; None where it is not installed, or belongs to a container's host.
        fits: whether that version works with the release: a Python package's pin, a system package's or a newer one.
    """

    package: str
    found: str | None
    expected: str
    fits: bool
    system: bool = False


def releases(line: Line = "neuron") -> list[Release]:
    """Those with a constraint file, the tested one first.

    Raises:
        ConfigError: there is none: src/ was copied without the folder that it links to.
    """
    listed = []
    for path in sorted(CONSTRAINTS.glob(f"{line}-*.txt")):
        text = path.read_text(encoding="utf-8")
        pins = (Requirement(line) for line in text.splitlines() if line and not line.startswith("#"))
        listed.append(Release(path.stem.removeprefix(f"{line}-"), path.name, tuple(pins), dict(_SYSTEM.findall(text))))
    if not listed:
        raise ConfigError(
            f"expected {line}-*.txt: the repository's constraints/, to which src/ links", file=CONSTRAINTS
        )
    return sorted(listed, key=lambda release: release.name != TESTED)


def release_here(line: Line = "neuron") -> Release | None:
    """The release that most of the installed Python packages are of, NxDI's or vllm-neuron's first; None if none."""

    def matching(release: Release) -> tuple[bool, int]:
        fitting = [state.package for state in states(release) if not state.system and state.fits]
        return (NXDI if line == "neuron" else VLLM_NEURON) in fitting, len(fitting)

    best = max(releases(line), key=matching)
    return best if matching(best)[1] else None


def states(release: Release) -> list[State]:
    """Every package of a release on this machine."""
    packages = []
    for pin in release.python:
        version = version_of(pin.name)
        fits = version is not None and pin.specifier.contains(Version(version), prereleases=True)
        packages.append(State(pin.name, version, str(pin.specifier), fits))
    for name, wanted in release.system.items():
        version = _system_version(name)
        fits = version is not None and Version(version) >= Version(wanted)
        packages.append(State(name, version, f">={wanted}", fits, system=True))
    return packages


def version_of(name: str) -> str | None:
    """Version of an installed Python package; None of others."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _system_version(name: str) -> str | None:
    """Version of a Debian or RPM package without its revision."""
    for query in (["dpkg-query", "-W", "-f", "${Version}", name], ["rpm", "-q", "--qf", "%{VERSION}", name]):
        if shutil.which(query[0]) is not None:
            done = subprocess.run(query, capture_output=True, text=True)
            if done.returncode == 0 and (version := re.match(r"[\d.]*\d", done.stdout)):
                return version[0]
    return None
