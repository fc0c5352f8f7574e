"""Our Triton kernels in Triton's interpreter at small sizes against float64: a GPU is not needed for that."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
from forked import python


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
def test_kernels_agree_with_float64() -> None:
    worker = Path(__file__).with_name("interpret_worker.py")
    done = subprocess.run([*python(), str(worker)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    errors = json.loads(done.stdout.splitlines()[-1])
    assert len(errors) == 38
    print("\n" + "\n".join(f"{name}: {value:.1e}" for name, value in errors.items()))
    assert {name: value for name, value in errors.items() if not value < 2e-6} == {}
