"""A wheel from an sdist, installed where no checkout is near: its files are all that the commands have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = ("src", "configs", "contrib", "pyproject.toml", "README.md", "LICENSE")
# One process for all commands: an import of torch for each would take most of the test's time.
RUNNER = """
import json, sys
import kimi_k2
from typer.testing import CliRunner
from kimi_k2.cli import app
print(kimi_k2.__file__)
for command in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, (command, result.output, result.exception)
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Interpreter of an environment with the wheel; the libraries that it needs are this environment's."""
    directory = tmp_path_factory.mktemp("wheel")
    tree = directory / "tree"
    tree.mkdir()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, tree / name)
    code = f"import setuptools.build_meta as backend; backend.build_sdist({str(directory)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=tree, timeout=120)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    sdist = str(directory / "kimi_k2-0.1.0.tar.gz")
    build = [*pip, "wheel", sdist, "--no-deps", "--no-build-isolation", "-w", str(directory)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (wheel,) = directory.glob("*.whl")
    shutil.rmtree(tree)
    venv.create(directory / "env", with_pip=False)
    interpreter = directory / "env" / "bin" / "python"
    where = [str(interpreter), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(where, check=True, capture_output=True, text=True).stdout.strip())
    libraries = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries))
    install = [*pip, "--python", str(interpreter), "install", "--no-deps", "--no-index", "--no-compile", str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=120)
    return interpreter


def isolated() -> dict[str, str]:
    """This process's environment without what could lead back to the checkout."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_commands_run_from_a_wheel(python: Path, tmp_path: Path) -> None:
    plans = [["plan", "kimi-k2-instruct-0905", "--json", "--preset", name] for name in ("trn2-tp64-ep1", "h200-tp8")]
    checkpoint, ranks = str(tmp_path / "tiny"), str(tmp_path / "ranks")
    commands = [
        *plans,
        ["plan", "kimi-k2-instruct-0905", "--all-presets"],
        ["inspect", "kimi-k2.6", "--preset", "trn2-tp32-ep2"],
        ["make-checkpoint", checkpoint, "--model", "kimi-k2-thinking", "--set", "num_hidden_layers=2"],
        ["inspect", checkpoint],
        ["convert", checkpoint, ranks, "--tp", "2"],
        ["verify", ranks],
        ["generate", checkpoint, "--prompt", "Hello", "--max-new-tokens", "4"],
    ]
    done = subprocess.run(
        [python, "-P", "-c", RUNNER, json.dumps(commands)],
        cwd=tmp_path, env=isolated(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert Path(done.stdout.splitlines()[0]).is_relative_to(python.parents[1]), "the checkout was imported"
    listed = python.parents[1].rglob("kimi_k2/neuron/nxdi/*.py")
    assert {path.name for path in (ROOT / "src" / "kimi_k2" / "neuron" / "nxdi").glob("*.py")} <= {
        path.name for path in listed
    }
    script = [str(python.with_name("kimi-k2")), "--version"]
    assert subprocess.run(script, cwd=tmp_path, env=isolated(), capture_output=True, text=True).stdout == (
        "kimi-k2 0.1.0\n"
    )
