"""Faults put into the code by cosmic-ray's operators, drawn by a seed: does a test see each of them?

    pip install cosmic-ray coverage
    python test/mutants.py [--jobs N] [--seconds S] [FIRST [COUNT]]

Mutants FIRST (0) to FIRST + COUNT (200) of one drawn order, over the packages below; those that change annotations or
docstrings alone are passed over. Each job has a copy of the tree of its own. Once, every test runs without a fault
under coverage. A mutant is then judged by tests that passed and ran its line (the quickest 40; then up to five minutes
of the others, first those of its package or that name its module), and by the rest of the files that name its module,
which may run it in other processes. A run that takes three times its tests' time and a minute kills a mutant. All is
kept in build/mutants (draw, baseline, a line for each judged mutant): a call goes on from there, and ends after S
seconds. Prints survivors with their difference.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

SEED = 45
PACKAGES = ("engine", "drafts", "plan", "parity", "quantization")
# Tests of other packages that import these; slow ones of backends (nxd, nki, kernels, serving, gpu) are left out.
TESTS = (
    *PACKAGES,
    "checkpoint",
    "sharding",
    "model",
    "ops",
    "synthetic",
    "media",
    "parallel",
    "cli",
    ".",
    "model/*",
)
ROOT = Path(__file__).parents[1]
SOURCE = Path("src") / "kimi_k2"
STATE = ROOT / "build" / "mutants"
SECONDS = 300.0


# In pytest: records the lines that each test runs, or picks the tests of a list in its order.
def pytest_configure(config: pytest.Config) -> None:
    if "MUTANTS_RECORD" in os.environ:
        config.pluginmanager.register(Recorder())


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    if "MUTANTS_PICK" in os.environ:
        order = {name: rank for rank, name in enumerate(json.loads(Path(os.environ["MUTANTS_PICK"]).read_text()))}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


class Recorder:
    """Lines of the packages by test; what fixtures run counts for all tests of the file."""

    def __init__(self) -> None:
        coverage = importlib.import_module("coverage")
        include = [str(Path.cwd() / SOURCE / name / "*") for name in PACKAGES]
        self.coverage = coverage.Coverage(data_file=None, include=include, config_file=False)
        self.tests: dict[str, tuple[bool, float]] = {}
        self.coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        passed, seconds = self.tests.get(report.nodeid, (True, 0.0))
        self.tests[report.nodeid] = passed and report.passed, seconds + report.duration

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {
            str(Path(name).relative_to(Path.cwd() / SOURCE)): data.contexts_by_lineno(name)
            for name in data.measured_files()
        }
        Path(os.environ["MUTANTS_RECORD"]).write_text(json.dumps({"tests": self.tests, "lines": lines}))


def bare(tree: ast.Module) -> str:
    """What is executed of a module: no annotations, no docstrings."""
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


def draw() -> Iterator[dict[str, Any]]:
    """Mutants in the drawn order."""
    init, mutating, plugins = (
        importlib.import_module(f"cosmic_ray.{name}") for name in ("commands.init", "mutating", "plugins")
    )
    modules = [path for name in PACKAGES for path in sorted((ROOT / SOURCE / name).rglob("*.py"))]
    drawn = [item.mutations[0] for item in init._all_work_items(modules, {})]
    drawn.sort(key=lambda one: (str(one.module_path), one.operator_name, one.occurrence))
    random.Random(SEED).shuffle(drawn)
    for one in drawn:
        source = Path(one.module_path).read_text()
        operator = plugins.get_operator(one.operator_name)(**one.operator_args)
        changed = mutating.mutate_code(source, operator, one.occurrence)
        try:
            if changed is None or bare(ast.parse(changed)) == bare(ast.parse(source)):
                continue
        except SyntaxError:  # * of a signature, read as a product
            continue
        module = str(Path(one.module_path).relative_to(ROOT / SOURCE))
        place = {"module": module, "operator": one.operator_name, "line": one.start_pos[0]}
        yield place | {"source": source, "changed": changed}


def lines_of(source: str, line: int) -> list[int]:
    """Lines of the statement around a line, of a compound one its head; none outside functions, as imports run it."""
    found: list[int] = []

    def walk(body: list[ast.stmt], inside: bool) -> None:
        for node in body:
            if not node.lineno <= line <= (node.end_lineno or 0):
                continue
            inner = [one for one in ast.walk(node) if one is not node and isinstance(one, ast.stmt)]
            last = min((one.lineno for one in inner), default=(node.end_lineno or 0) + 1)
            found[:] = range(node.lineno, max(last, node.lineno + 1)) if inside else []
            walk(inner, inside or isinstance(node, ast.FunctionDef))

    walk(ast.parse(source).body, False)
    return found


class Tree:
    """A copy of the sources and tests, and pytest in it."""

    def __init__(self, work: Path, number: int, deadline: float) -> None:
        self.root, self.work, self.deadline = work / str(number), work, deadline
        kept_out = shutil.ignore_patterns(".git", "build", "shared", "__pycache__", ".*_cache", ".venv*")
        shutil.copytree(ROOT, self.root, symlinks=True, ignore=kept_out)

    def pytest(self, files: list[str], seconds: float, **variables: str) -> tuple[int, str]:
        """Status and output; status 1 where it takes too long, TimeoutError at the deadline."""
        left = self.deadline - time.monotonic()
        if left < 0:
            raise TimeoutError
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "mutants", *files]
        path = [str(self.root / "src"), str(self.root / "test"), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", **variables}
        child = subprocess.Popen(
            command, cwd=self.root, env=environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            said = child.communicate(timeout=min(seconds, left))[0]
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            if left < seconds:
                raise TimeoutError from None
            return 1, f"over {seconds:.0f} s"
        return child.returncode, said

    def record(self, file: str) -> dict[str, Any]:
        """Tests of a file, whether each passes, and the lines they run."""
        out = self.work / f"{self.root.name}.json"
        _, said = self.pytest([file], 600, MUTANTS_RECORD=str(out))
        if not out.exists():
            return {"tests": {}, "lines": {}, "said": said[-2000:]}
        found: dict[str, Any] = json.loads(out.read_text())
        out.unlink()
        return found | ({} if all(passed for passed, _ in found["tests"].values()) else {"said": said[-2000:]})

    def judge(self, mutant: dict[str, Any], baseline: dict[str, Any]) -> dict[str, Any]:
        """Runs the tests of a mutant."""
        path = self.root / SOURCE / mutant["module"]
        source, start = path.read_text(), time.monotonic()
        pick = self.work / f"{self.root.name}.pick"
        batches = batches_of(mutant, lines_of(source, mutant["line"]), baseline)
        path.write_text(mutant["changed"])
        judged = {key: mutant[key] for key in ("number", "module", "operator", "line")}
        try:
            for rank, tests in enumerate(batches):
                pick.write_text(json.dumps(list(tests)))
                files = list(dict.fromkeys(name.split("::")[0] for name in tests))
                limit = 60 + 3 * sum(tests.values())
                status, said = self.pytest([*files, "-x"], limit, MUTANTS_PICK=str(pick))
                if status:
                    seen = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
                    by = (seen or said.splitlines() or [""])[-1][:200]
                    return judged | {"end": "killed", "by": by, "batch": rank, "seconds": time.monotonic() - start}
        finally:
            path.write_text(source)
        lines = difflib.unified_diff(source.splitlines(), mutant["changed"].splitlines(), lineterm="", n=2)
        ran = [len(tests) for tests in batches]
        return judged | {"end": "survived", "ran": ran, "seconds": time.monotonic() - start, "diff": list(lines)}


def batches_of(mutant: dict[str, Any], lines: list[int], baseline: dict[str, Any]) -> list[dict[str, float]]:
    """Passing tests with their seconds."""
    module, ran, rest = mutant["module"], dict[str, float](), dict[str, float]()
    name = "kimi_k2." + module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    near = {
        file
        for file in baseline
        if name in (ROOT / file).read_text() or file.startswith(f"test/{Path(module).parts[0]}/")
    }
    for file, record in baseline.items():
        passing = {test: seconds for test, (passed, seconds) in record["tests"].items() if passed}
        contexts = record["lines"].get(module, {})
        here = {test for line in lines or contexts for test in contexts.get(str(line), ())}
        if "" in here and lines:
            here |= set(passing)
        ran |= {test: seconds for test, seconds in passing.items() if test in here}
        rest |= {test: seconds for test, seconds in passing.items() if test not in here and file in near}
    quick = sorted(ran, key=ran.__getitem__)
    batches = [quick[:40], [], list(rest)]
    used = 0.0
    for test in sorted(quick[40:], key=lambda test: (test.split("::")[0] not in near, ran[test])):
        used += ran[test]
        if used < SECONDS:
            batches[1].append(test)
    return [{test: (ran | rest)[test] for test in batch} for batch in batches if batch]


def main() -> None:
    """Draw, run and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("first", type=int, nargs="?", default=0)
    parser.add_argument("count", type=int, nargs="?", default=200)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seconds", type=float, default=1e9)
    asked = parser.parse_args()
    deadline = time.monotonic() + asked.seconds
    STATE.mkdir(parents=True, exist_ok=True)
    drawn, baseline, judged = (STATE / name for name in ("drawn.json", "baseline.json", "judged.jsonl"))
    mutants = json.loads(drawn.read_text()) if drawn.exists() else []
    if len(mutants) < asked.first + asked.count:
        mutants = [{"number": n, **one} for n, one in enumerate(islice(draw(), asked.first + asked.count))]
        drawn.write_text(json.dumps(mutants))
    if any((ROOT / SOURCE / one["module"]).read_text() != one["source"] for one in mutants):
        raise SystemExit(f"{STATE} is of other sources: remove it")
    records: dict[str, Any] = json.loads(baseline.read_text()) if baseline.exists() else {}
    found = [path for name in TESTS for path in (ROOT / "test").glob(f"{name}/test_*.py")]
    files = [str(path.relative_to(ROOT)) for path in sorted(found, key=lambda path: -path.stat().st_size)]
    done = {one["number"]: one for one in map(json.loads, judged.read_text().splitlines())} if judged.exists() else {}
    with tempfile.TemporaryDirectory(prefix="kimi-k2-mutants-") as work, ThreadPoolExecutor(asked.jobs) as pool:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for tree in pool.map(lambda number: Tree(Path(work), number, deadline), range(asked.jobs)):
            trees.put(tree)

        def in_trees(call: Callable[..., Any], given: list[Any], *more: Any) -> Iterator[tuple[Any, Any]]:
            def one(thing: Any) -> Any:
                tree = trees.get()
                try:
                    return call(tree, thing, *more)
                except TimeoutError:
                    return None
                finally:
                    trees.put(tree)

            futures = {pool.submit(one, thing): thing for thing in given}
            for future in as_completed(futures):
                if (result := future.result()) is not None:
                    yield futures[future], result

        for file, record in in_trees(Tree.record, [file for file in files if file not in records]):
            records[file] = record
            if "said" in record:
                print(f"left out, as it fails without a fault: {file}: {record['said'][-300:]}", flush=True)
            baseline.write_text(json.dumps(records))
        if len(records) < len(files):
            raise SystemExit(f"baseline of {len(records)} of {len(files)} files; run it again to resume")
        waiting = [one for one in mutants[asked.first : asked.first + asked.count] if one["number"] not in done]
        for mutant, one in in_trees(Tree.judge, waiting, records):
            done[mutant["number"]] = one
            with judged.open("a") as report:
                report.write(json.dumps(one) + "\n")
    wanted = [done[n] for n in range(asked.first, asked.first + asked.count) if n in done]
    survived = [one for one in wanted if one["end"] == "survived"]
    for one in survived:
        print(f"{one['number']}: {one['module']}: {one['operator']}, after {one['ran']} tests:", *one["diff"], sep="\n")
    print(f"{len(wanted)} of {asked.count} mutants judged, {len(survived)} survived")


if __name__ == "__main__":
    main()
