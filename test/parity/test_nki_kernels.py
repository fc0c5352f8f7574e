"""`parity kernels`: the emulator's recording, and a comparison that sees what differs."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import kimi
from safetensors.torch import load_file, save_file

from kimi_k2.errors import CheckpointError
from kimi_k2.parity.kernels import CASES, TENSORS, compare_kernels
from nki_emulator import install


def test_kernels_are_recorded_compared_and_a_wrong_result_is_named(tmp_path: Path) -> None:
    assert install(), "this test compares the emulator with itself"
    done = kimi("parity", "kernels", tmp_path)
    assert done.output.count(" ok\n") == 2
    # By hand: the new latents.
    held = load_file(tmp_path / TENSORS)
    latents = held["0.input.projected"][:, 1536:2048].double()
    scale = held["0.input.hidden"].double().square().mean().add(1e-5).rsqrt()
    latents = latents * scale
    wanted = latents * latents.square().mean().add(1e-6).rsqrt() * held["0.input.kv_norm"].double()
    assert (held["0.result.1"][0].double() - wanted).norm() / wanted.norm() < 5e-3

    held["1.result.0"] *= 1.02
    save_file(held, tmp_path / TENSORS)
    done = kimi("parity", "kernels", tmp_path, status=1)
    (wrong,) = [line for line in done.output.splitlines() if line.endswith("DIFFERS")]
    assert wrong.split()[1] == "TP32"

    (tmp_path / CASES).write_text("{}")
    with pytest.raises(CheckpointError, match=CASES):
        list(compare_kernels(tmp_path))
