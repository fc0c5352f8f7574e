"""What a plain `pip install kimi-k2` brings is enough for all but the optional parts."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kimi_k2.cli import main
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import TINY_VISION, tiny_config

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
# Imports every module that belongs to no optional part, where the packages of the extras cannot be found.
IMPORTER = """
import importlib, json, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

absent, optional = map(tuple, json.loads(sys.argv[1]))
sys.meta_path.insert(0, Absent())
import kimi_k2
for found in pkgutil.walk_packages(kimi_k2.__path__, "kimi_k2."):
    if not found.name.startswith(optional):
        importlib.import_module(found.name)
        print(found.name)
"""
# GPU kernels, the classes on NxDI, NKI's kernels (which import `nki` when they are traced), engines' plugins, HTTP.
OPTIONAL = ("kernels", "contrib_model", "neuron.nxdi", "nki.kernels", "serving.vllm", "serving.sglang")
MODULES = {"pyyaml": "yaml", "pillow": "PIL"}  # where a distribution's package has another name


def packages(requirements: list[str]) -> set[str]:
    from packaging.requirements import Requirement

    names = {Requirement(line).name for line in requirements}
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def test_modules_import_without_the_extras() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = packages([line for lines in project["optional-dependencies"].values() for line in lines])
    absent = extras - packages(project["dependencies"]) - {"kimi_k2", "setuptools"}
    assert {"transformers", "triton"} <= absent
    given = [sorted(absent), [f"kimi_k2.{name}" for name in OPTIONAL]]
    run = [sys.executable, "-c", IMPORTER, json.dumps(given)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    if done.returncode:
        pytest.fail(done.stderr[-2000:])
    assert {"kimi_k2.plan.report", "kimi_k2.bench.sweep", "kimi_k2.cli.commands.plan"} <= set(done.stdout.split())


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    write_synthetic_checkpoint(tmp_path, tiny_config("kimi-k2.5", vision=TINY_VISION))
    with pytest.raises(SystemExit) as ended:
        main(arguments=["parity", "tower", str(tmp_path)])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs transformers" in line
    assert "pip install 'kimi-k2[parity]'" in line
