"""The rows of `machines.rows` that run in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
from forked import python
from machines import INTERPRETED


@pytest.mark.skipif(INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_rows_in_tritons_interpreter() -> None:
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 5):
        pytest.skip(f"Triton {triton}'s interpreter counts no loop with NumPy {numpy}")
    here = Path(__file__).parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*python(), "-m", "pytest", "-q", "-m", "interpreted", "-p", "no:cacheprovider", str(here)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=here.parents[1])
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]
