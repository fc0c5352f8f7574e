"""Sizes for ranks on GPUs, and commands without a process of their own."""

from __future__ import annotations

import contextlib
import io
import subprocess
from collections.abc import Callable

import pytest

from kimi_k2.cli import main
from kimi_k2.config import KimiK2Config
from kimi_k2.synthetic.config import tiny_config


@pytest.fixture(params=["kimi-k2-instruct-0905", "kimi-k2-thinking"])
def for_gpus(request: pytest.FixtureRequest) -> KimiK2Config:
    """Sizes that kernels take and that four ranks can cut, in FP8 and INT4."""
    sizes = {"hidden_size": 1024, "moe_intermediate_size": 512, "intermediate_size": 512, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 8, "v_head_dim": 64, "num_key_value_heads": 8, "qk_nope_head_dim": 64}
    return tiny_config(request.param, **sizes, qk_rope_head_dim=64)


@pytest.fixture
def run_here() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs words behind `kimi-k2` in this process, which has imported already what a new one would."""
    return _run_here


def _run_here(*command: object) -> subprocess.CompletedProcess[str]:
    words, out, errors = [str(word) for word in command], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as ended:
        main(arguments=words)
    return subprocess.CompletedProcess(words, int(ended.value.code or 0), out.getvalue(), errors.getvalue())
