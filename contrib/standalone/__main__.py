"""Writes the folder that a pull request to NxDI would hold: `python -m contrib.standalone DIR`, from the repository."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from . import form
from .bundle import Bundle
from .fold import Known, fold
from .known import KNOWN
from .module import Module

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NXDI = ROOT / "contrib" / "models" / "Kimi-K2-Instruct-0905" / "src"


def modules() -> dict[str, Module]:
    """All modules that a bundle may need, by name, where what `known` says holds."""
    paths = {f"nxdi.{path.stem}": path for path in sorted(NXDI.glob("*.py")) if path.stem != "__init__"}
    for path in sorted((ROOT / "src" / "kimi_k2").rglob("*.py")):
        relative = path.relative_to(ROOT / "src").with_suffix("")
        if "nxdi" not in relative.parts and path.stem != "__init__":
            paths[".".join(relative.parts)] = path
    made = {}
    for name in sorted({one for _, names in form.FILES.values() for one in names}):
        try:
            text = fold(paths[name].read_text(encoding="utf-8"), KNOWN.get(name, Known()))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        made[name] = Module(name, text, paths.__contains__, package=name.rpartition(".")[0])
    return made


def write(directory: Path, *, formatted: bool = True) -> None:
    """Write the folder; what is there under the same names is replaced.

    Raises:
        ValueError: a module of the source no longer is what `known` says, or reaches what belongs to no file.
        CalledProcessError: (formatted) ruff finds a name that is not defined, or not used.
    """
    files = {file: names for file, (_, names) in form.FILES.items()}
    made = modules()
    bundle = Bundle(made, form.ROOTS, files, [name for name in made if name.startswith("nxdi.")])
    source = directory / "src"
    source.mkdir(parents=True, exist_ok=True)
    for file, (docstring, _) in form.FILES.items():
        (source / f"{file}.py").write_text(bundle.text(file, docstring), encoding="utf-8")
    for path in (HERE / "folder").rglob("*.*"):
        if "__pycache__" not in path.parts:
            target = directory / path.relative_to(HERE / "folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    if formatted:
        ruff = [sys.executable, "-m", "ruff"]
        options = ["--config", str(ROOT / "pyproject.toml"), str(source)]
        subprocess.run([*ruff, "check", "-q", "--fix", "--unsafe-fixes", "--select", "I,F", *options], check=True)
        subprocess.run([*ruff, "format", "-q", *options], check=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m contrib.standalone", description=__doc__)
    parser.add_argument("directory", type=Path, help="the model's folder in a checkout of NxDI: contrib/models/NAME")
    parser.add_argument("--unformatted", action="store_true", help="leave ruff out, where it is not installed")
    arguments = parser.parse_args()
    write(arguments.directory, formatted=not arguments.unformatted)
