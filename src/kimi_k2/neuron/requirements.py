"""What makes NxD importable from its source, and what of it this environment has; `kimi-k2 doctor` shows it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from kimi_k2.neuron.sdk import version_of


@dataclass(frozen=True)
class Requirement:
    """A package that NxD's or NxDI's source imports.

    Attributes:
        module: its import name.
        package: its name in package indexes; None for NxD and NxDI, which are cloned.
        works: the version that the tests ran with, or the release.
        why: who wants it, where that is not plain.
    """

    module: str
    package: str | None
    works: str
    why: str = ""


# With these the tests of test/nxd pass on Python 3.11 (SDK 2.29).
REQUIREMENTS = (
    Requirement("neuronx_distributed", None, "source of 0.18 (SDK 2.29) or 0.17 (2.28)"),
    Requirement("neuronx_distributed_inference", None, "source of 0.9 (SDK 2.29) or 0.8 (2.28)"),
    Requirement("torch", "torch", "2.9.1"),
    Requirement("torch_xla", "torch-xla", "2.9.0"),
    Requirement("transformers", "transformers", "4.57.6", "5.x lacks what NxDI imports"),
    Requirement("boto3", "boto3", "any", "imported by NxD without being declared"),
    Requirement("torchvision", "torchvision", "0.24.1"),
    Requirement("google.protobuf", "protobuf", "any"),
    Requirement("tenacity", "tenacity", "any", "NxDI of SDK 2.29"),
    Requirement("scipy", "scipy", "any", "NxDI of SDK 2.28"),
    # XLA for the CPU, on which test/nxd executes the graphs that the compiler would get; NxD itself needs none of it.
    Requirement("jax", "jax", "0.8.0", "tests that execute lowered graphs are skipped without it"),
    Requirement("vllm", "vllm", "0.11.0", "vllm-neuron 0.2 is written for it"),
    Requirement("vllm_neuron", None, "source of branch release-0.2.x"),
)


@dataclass(frozen=True)
class State:
    """A requirement in this environment: whether it can be imported, and its version if that is known."""

    requirement: Requirement
    importable: bool
    version: str | None

    @property
    def as_tested(self) -> bool:
        """Whether the version is the one that the tests ran with, or none was asked for."""
        works = self.requirement.works
        return self.importable and (works == "any" or self.version is None or self.version.partition("+")[0] == works)


def state(requirement: Requirement) -> State:
    """Look one up without importing it."""
    try:
        importable = importlib.util.find_spec(requirement.module) is not None
    except ModuleNotFoundError:  # the parent package of a dotted name
        importable = False
    version = version_of(requirement.package) if importable and requirement.package is not None else None
    return State(requirement, importable, version)


def states() -> list[State]:
    """Each requirement with what is installed of it."""
    return [state(requirement) for requirement in REQUIREMENTS]
