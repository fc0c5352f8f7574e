"""The folder for a pull request to NxDI stands alone: its size, its imports, its own tests; with NxD: test/nxd."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kimi_k2.neuron.compile import compiler_args, environment
from kimi_k2.plan.deployment import STAGES, Deployment

ROOT = Path(__file__).parents[2]
# Run before pytest: nothing of the repository can be imported.
BLOCKED = "import sys, pytest; sys.modules['kimi_k2'] = None; sys.exit(pytest.main(sys.argv[1:]))"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder in a checkout of NxDI that has nothing else; ruff has found every name defined and used."""
    path = tmp_path_factory.mktemp("neuronx-distributed-inference") / "contrib" / "models" / "Kimi-K2-Instruct-0905"
    subprocess.run([sys.executable, "-m", "contrib.standalone", str(path)], cwd=ROOT, check=True)
    return path


def test_it_is_small_and_imports_nothing_of_ours(folder: Path) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) <= 12, files
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 800, path
        if path.suffix == ".py":
            nodes = list(ast.walk(ast.parse(text)))
            imported = [one.name for node in nodes if isinstance(node, ast.Import) for one in node.names]
            imported += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
            assert not [name for name in imported if name.partition(".")[0] in ("kimi_k2", "contrib")], path
            assert "kimi-k2 convert" not in re.sub(r"`kimi-k2 convert` wrote", "", text), path


def test_it_is_the_same_again(folder: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-m", "contrib.standalone", str(tmp_path)], cwd=ROOT, env=env, check=True)
    for path in tmp_path.rglob("*.*"):
        assert path.read_bytes() == (folder / path.relative_to(tmp_path)).read_bytes(), path


def test_its_unit_tests_pass_without_the_package(folder: Path) -> None:
    picked = ["test/unit", "-k", "refused or fp8-blockwise"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", BLOCKED, "-q", "-p", "no:cacheprovider", "--rootdir", ".", *picked]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)
    assert "4 passed" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


def test_its_readme_says_what_the_preset_sets(folder: Path) -> None:
    """Compiler arguments and environment of trn2-tp32-ep2, but for options that the class passes itself."""
    text, preset = (folder / "README.md").read_text(encoding="utf-8"), Deployment.load("trn2-tp32-ep2")
    exports = re.findall(r"(\w+)=(\S+)", "".join(re.findall(r"^export (.*\n)", text, re.MULTILINE)))
    assert dict(exports) == environment(preset)
    shared = set(re.findall(r'"(-[^"]*)"', text[text.index("arguments = (") : text.index("neuron = ")]))
    for stage in STAGES:
        (level,) = re.findall(rf'"{stage}": \("(-O\d)", \*arguments\)', text)
        assert {*shared, level} == {one for one in compiler_args(preset, stage) if not one.startswith("--tensorizer")}


@pytest.mark.skipif(not os.environ.get("KIMI_K2_SLOW"), reason="slow: runs with KIMI_K2_SLOW=1")
def test_its_types_hold(folder: Path, tmp_path: Path) -> None:
    """Strict mypy finds an attribute or an argument that the folder's form dropped and something still names."""
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        "[mypy]\nstrict = true\ndisallow_subclassing_any = false\nwarn_return_any = false\nfollow_imports = silent\n"
        "ignore_missing_imports = true\nuntyped_calls_exclude = torch\n"
        "[mypy-neuronx_distributed.*,neuronx_distributed_inference.*,torch_xla.*,safetensors.*]\n"
        "follow_imports = skip\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", str(settings), "src"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_what_is_known_is_put_in_and_nothing_else_changes() -> None:
    """Constants of the source decide as before; parameters go from signatures, calls and docstrings."""
    source = '''def f(x, early=None, *, tiles=""):
    """Say.

    Args:
        x: kept.
        early: gone.
            With its second line.
    """
    # Why.
    kernel = make(x) if x.kernels else None
    width = x.high - x.low or 0.001
    if kernel is not None and x.wide:
        return kernel(x)
    if not x.kernels:
        y = g(x, early, tiles=tiles or "none", count=x.count or 1)
    else:
        y = 0
    return y, width
'''
    expected = '''def f(x, *, tiles = ""):
    """Say.

    Args:
        x: kept.
    """
    width = x.high - x.low or 0.001
    y = g(x, tiles=tiles or "none", count=x.count or 1)
    return y, width
'''
    spec = importlib.util.spec_from_file_location("fold", ROOT / "contrib" / "standalone" / "fold.py")
    assert spec is not None
    assert spec.loader is not None
    fold = importlib.util.module_from_spec(spec)
    sys.modules["fold"] = fold  # where its dataclass is looked up
    spec.loader.exec_module(fold)
    known = fold.Known(values={"x.kernels": False, "kernel": None}, parameters={"early": None})
    assert fold.fold(source, known) == expected
    with pytest.raises(ValueError, match=r"not there: 'x\.other'"):
        fold.fold(source, fold.Known(reworded={"x.other": "x"}))
