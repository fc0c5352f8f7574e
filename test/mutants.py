"""Faults put into the code by cosmic-ray's operators, drawn by a seed: does a test see each of them?

    pip install cosmic-ray
    python test/mutants.py [FIRST [COUNT]]

Mutants FIRST (0) to FIRST + COUNT (200) of one drawn order, over the packages below, each in a copy of the tree: first
the tests that import the changed module, then all of its package. One that changes annotations or docstrings alone is
passed over. Prints each, those that survive with their difference, and at the end how many did.
"""

from __future__ import annotations

import ast
import importlib
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SEED = 30
PACKAGES = ("quantization", "sharding", "checkpoint", "ops", "tokenization")
ROOT = Path(__file__).parents[1]
SECONDS = 900


def bare(source: str) -> str:
    """What is executed of a module: no annotations, no docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
                argument.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    return ast.dump(tree)


def tests_of(module: Path) -> tuple[list[str], list[str]]:
    """Tests that import a module, and all of its package."""
    name = ".".join(module.relative_to(ROOT / "src").with_suffix("").parts)
    package = module.relative_to(ROOT / "src" / "kimi_k2").parts[0]
    near = [path for path in sorted((ROOT / "test").rglob("test_*.py")) if re.search(rf"{name}\b", path.read_text())]
    cheap = [path for path in near if path.parent.name not in ("gpu", "nxd", "serving", "bench")]
    return [str(path.relative_to(ROOT)) for path in cheap], [f"test/{package}", "test/robustness"]


def survives(tree: Path, tests: list[str]) -> bool:
    """Whether the tests pass in a tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, 5)


def main() -> None:
    """Draw, run and report."""
    init, mutating, plugins = (
        importlib.import_module(f"cosmic_ray.{name}") for name in ("commands.init", "mutating", "plugins")
    )
    first, count = (int(word) for word in (*sys.argv[1:], *("0", "200")[len(sys.argv) - 1 :]))
    modules = [path for name in PACKAGES for path in sorted((ROOT / "src" / "kimi_k2" / name).rglob("*.py"))]
    drawn = [item.mutations[0] for item in init._all_work_items(modules, {})]
    drawn.sort(key=lambda one: (str(one.module_path), one.operator_name, one.occurrence))
    random.Random(SEED).shuffle(drawn)
    ran, survivors, number = 0, 0, -1
    sound: dict[tuple[str, ...], bool] = {}  # by tests: whether they pass without a fault
    with tempfile.TemporaryDirectory(prefix="kimi-k2-mutants-") as work:
        tree = Path(work) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "shared"))
        for one in drawn:
            module = Path(one.module_path)
            source, copy = module.read_text(), tree / module.relative_to(ROOT)
            changed = mutating.mutate_code(
                source, plugins.get_operator(one.operator_name)(**one.operator_args), one.occurrence
            )
            try:
                if changed is None or bare(changed) == bare(source):
                    continue
            except SyntaxError:  # * of a signature, read as a product
                continue
            number += 1
            if not first <= number < first + count:
                continue
            near, all_of_it = tests_of(module)
            if near and tuple(near) not in sound:
                sound[tuple(near)] = survives(tree, near)
            if not sound.get(tuple(near), True):
                print(f"{number}: no verdict, tests fail without it: {near}", flush=True)
                continue
            copy.write_text(changed)
            lives = (not near or survives(tree, near)) and survives(tree, all_of_it)
            copy.write_text(source)
            ran, survivors = ran + 1, survivors + lives
            end = "SURVIVED" if lives else "killed"
            print(f"{number}: {end}: {module.relative_to(ROOT)}: {one.operator_name}", flush=True)
            if ran == count:
                break
    print(f"{ran} mutants of {len(drawn)} places, {survivors} survived")


if __name__ == "__main__":
    main()
