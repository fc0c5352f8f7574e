"""What makes NxD importable from its source, and what of it this environment has; `kimi-k2 doctor` shows it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from kimi_k2.neuron.sdk import State, version_of


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


def states() -> list[State]:
    """Each requirement in this environment, looked up without importing it; it fits if it is of the version named."""
    listed = []
    for requirement in REQUIREMENTS:
        try:
            importable = importlib.util.find_spec(requirement.module) is not None
        except ModuleNotFoundError:  # the parent package of a dotted name
            importable = False
        package, works = requirement.package, requirement.works
        version = version_of(package) if importable and package is not None else None
        found = version or ("importable, version unknown" if importable else None)
        fits = importable and (works == "any" or version is None or version.partition("+")[0] == works)
        wanted = "" if works == "any" else f"works with {works}"
        expected = ", ".join(text for text in (wanted, requirement.why) if text)
        listed.append(State(package or requirement.module, found, expected, fits))
    return listed
