"""requirements-neuron.txt and constraints/: what `compile` accepts, what the SDK brings itself, and what is missing."""

from __future__ import annotations

import importlib.machinery
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kimi_k2.neuron import contrib, sdk
from kimi_k2.neuron.compile import CompileError, check_sdk

ROOT = Path(__file__).parents[2]


def needed() -> dict[str, SpecifierSet]:
    """Requirements by name, without options and comments."""
    lines = (ROOT / "requirements-neuron.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    return {one.name: one.specifier for one in found}


def test_nothing_of_the_sdks_own_is_pinned() -> None:
    assert not {"torch", "torch-xla", "transformers", "numpy"} & set(needed())
    assert not any(needed().values())


@pytest.mark.parametrize("release", sdk.releases(), ids=lambda one: one.name)
def test_a_release_pins_all_that_must_go_together(release: sdk.Release) -> None:
    """Versions as its manifest has them: aws-neuron-sdk, src/helperscripts/n2-manifest.json."""
    pins = {one.name: str(one.specifier) for one in release.python}
    assert set(pins) - {"transformers"} == {name for name in needed() if "neuron" in name or name == "nki"}
    assert {name.removeprefix("aws-neuronx-") for name in release.system} == {
        "dkms", "runtime-lib", "collectives", "tools",
    }  # fmt: skip


def installed(monkeypatch: pytest.MonkeyPatch, release: str, **other: str | None) -> None:
    """A machine with a release's packages, but for `other`; None is not installed."""
    made = next(one for line in ("neuron", "vllm-neuron") for one in sdk.releases(line) if one.name == release)
    python = {pin.name: str(pin.specifier)[2:].replace("*", "6") for pin in made.python} | {
        name.replace("_", "-"): version for name, version in other.items()
    }
    monkeypatch.setattr(sdk, "version_of", python.get)
    monkeypatch.setattr(sdk, "_system_version", {**made.system, **python}.get)
    monkeypatch.setattr("shutil.which", lambda name: name)


def test_releases_without_nxdi_pin_what_vllm_neuron_needs() -> None:
    for release in sdk.releases("vllm-neuron"):
        pins = {one.name: one.specifier for one in release.python}
        version = next(iter(pins["vllm-neuron"])).version
        assert pins["vllm"].contains(version.rpartition(".0.1")[0], prereleases=True)  # 0.29.0 of 0.29.0.1.2.0
        assert {"neuronx-cc", "nki"} < set(pins)
        assert not any("distributed" in name for name in pins)


@pytest.mark.parametrize("release", ["2.29", "2.31"])
def test_compile_takes_a_whole_release(monkeypatch: pytest.MonkeyPatch, release: str) -> None:
    installed(monkeypatch, release)
    assert check_sdk().name == release
    # The local part that the vendor's wheels have, a newer driver, and a driver that a container cannot see.
    nxdi = next(str(pin.specifier)[2:] for pin in sdk.releases()[0].python if pin.name == sdk.NXDI)
    installed(monkeypatch, "2.29", neuronx_distributed_inference=f"{nxdi}+1a2b3c", aws_neuronx_dkms="9.9")
    assert check_sdk().name == "2.29"
    installed(monkeypatch, "2.29", aws_neuronx_dkms=None)
    assert check_sdk().name == "2.29"


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"neuronx_cc": "2.26.6360.0"}, r"neuronx-cc is 2\.26\.6360\.0, expected ==2\.24\.8799\.0"),
        ({"torch_neuronx": "2.9.0.2.15.32035"}, "torch-neuronx is 2.9.0.2.15.32035"),
        ({"nki": "0.7.0"}, "nki is 0.7.0"),
        ({"nki": None}, "nki is not installed"),
        ({"transformers": "5.23.0"}, "transformers is 5.23.0"),
        ({"aws_neuronx_dkms": "2.26.0.0"}, "aws-neuronx-dkms is 2.26.0.0, expected >="),
    ],
)
def test_compile_refuses_packages_of_two_releases(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, str | None], says: str
) -> None:
    installed(monkeypatch, "2.29", **other)
    with pytest.raises(CompileError, match=f"Neuron SDK 2.29.*{says}"):
        check_sdk()


def test_the_line_without_nxdi_is_checked_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, "2.33")
    assert check_sdk("vllm-neuron").name == "2.33"
    with pytest.raises(CompileError, match=r"2\.29 or 2\.28 or 2\.31"):
        check_sdk()
    installed(monkeypatch, "2.33", nki="0.6.0")
    with pytest.raises(CompileError, match=r"vllm-neuron-2\.33\.txt\): nki is 0\.6\.0, expected ==0\.7\.0"):
        check_sdk("vllm-neuron")


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


@pytest.mark.parametrize("undeclared", ["scipy", "tenacity"])
def test_an_undeclared_import_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, undeclared: str) -> None:
    """A release whose source imports the package, and an environment without it."""
    (tmp_path / "storage.py").write_text(f"import os\nfrom {undeclared} import something\n")

    def find(name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name in contrib.UNDECLARED:
            return None
        spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(tmp_path)]
        return spec

    monkeypatch.setattr("importlib.util.find_spec", find)
    assert contrib.missing() == [undeclared]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert contrib.missing() == list(contrib.NEEDED)
