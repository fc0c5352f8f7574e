"""The folder for a pull request to NxDI, in a bare checkout: real NxD, no `kimi_k2`; its own tests, run there."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_readme_steps import Machine

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("standalone_worker.py")
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """contrib/models/NAME of a checkout that has nothing else."""
    path = tmp_path_factory.mktemp("neuronx-distributed-inference") / "contrib" / "models" / "Kimi-K2-Instruct-0905"
    write = [sys.executable, "-m", "contrib.standalone", "--unformatted", str(path)]
    subprocess.run(write, cwd=ROOT, check=True)
    return path


def run(folder: Path, mode: str, ranks: int, *tests: str, **env: str) -> list[str]:
    """Reports of pytest over the folder, one a rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, str(WORKER), mode, "-q", "-s", "-p", "no:cacheprovider", "--rootdir", ".", *tests]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **env}
    shared["PYTHONPATH"] = os.pathsep.join([*(path for path in sys.path if path), shared.get("PYTHONPATH", "")])
    started = []
    for rank in range(ranks):
        own = {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)} if mode == "cpu" else {}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, cwd=folder, env={**shared, **own}, **options))  # type: ignore[call-overload]
    try:
        reports = [one.communicate(timeout=500)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    assert not any(one.returncode for one in started), "\n".join(report[-4000:] for report in reports)
    return reports


def differences(report: str) -> list[float]:
    """What the tests of logits printed."""
    print("\n".join(re.findall(r"\w+: largest difference \S+", report)))
    return [float(one) for one in re.findall(r"largest difference (\S+)", report)]


def test_its_own_tests_in_cpu_mode(folder: Path) -> None:
    (report,) = run(folder, "cpu", 1, "test")
    assert re.search(r"\b1[0-9] passed, 1 skipped", report), report
    assert len(differences(report)) == 3
    assert max(differences(report)) <= TOLERANCE


@pytest.mark.parametrize("layout", [{"KIMI_K2_TP": "2"}, {"KIMI_K2_TP": "1", "KIMI_K2_EP": "2"}], ids=["TP2", "EP2"])
def test_logits_on_two_ranks(folder: Path, layout: dict[str, str]) -> None:
    for report in run(folder, "cpu", 2, "test/integration", "-k", "logits and not int4", **layout):
        assert len(differences(report)) == 2, report
        assert max(differences(report)) <= TOLERANCE


def test_it_compiles_and_loads_ranks_of_its_own(folder: Path, tmp_path: Path) -> None:
    """Compiler and device mocked: compile writes the ranks' files, which NxDI's `load` hands to the model."""
    machine = Machine(tmp_path)
    env = {"PATH": machine.env["PATH"], "BASE_COMPILE_WORK_DIR": machine.env["BASE_COMPILE_WORK_DIR"]}
    (report,) = run(folder, "mocked", 1, "test/integration", "-k", "logits and fp8", **env)
    assert len(differences(report)) == 1, report
    assert max(differences(report)) <= TOLERANCE
