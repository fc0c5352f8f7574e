"""requirements-neuron.txt against what `compile` accepts and what the Neuron SDK brings itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kimi_k2.neuron.compile import CHECKED_RELEASES

ROOT = Path(__file__).parents[2]


def needed() -> dict[str, SpecifierSet]:
    """Requirements by name, without options and comments."""
    lines = (ROOT / "requirements-neuron.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    return {one.name: one.specifier for one in found}


def test_nothing_of_the_sdks_own_is_pinned() -> None:
    assert not {"torch", "torch-xla", "transformers", "numpy"} & set(needed())
    pinned = re.findall(r"^(\S+)==", (ROOT / "requirements-neuron.txt").read_text(), re.MULTILINE)
    assert not pinned


def test_the_releases_are_those_that_compile_accepts() -> None:
    for name, releases in CHECKED_RELEASES.items():
        major, minors = releases[0].split(".")[0], sorted(int(release.split(".")[1]) for release in releases)
        accepted = [
            minor for minor in range(minors[0] - 2, minors[-1] + 3) if f"{major}.{minor}.1234" in needed()[name]
        ]
        assert accepted == minors, name


def test_python_is_asked_for_alike() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    oldest = project["project"]["requires-python"].removeprefix(">=")
    assert project["tool"]["mypy"]["python_version"] == oldest
    assert project["tool"]["ruff"]["target-version"] == "py" + oldest.replace(".", "")
    install = (ROOT / "scripts" / "install.sh").read_text()
    assert f"Python {oldest} or newer" in install
    assert f"({oldest.replace('.', ', ')})" in install
    for name in ("requirements.txt", "requirements-neuron.txt"):
        assert f"Python {oldest} or newer" in (ROOT / name).read_text(), name
