"""How many of our files a reader has to open who follows a decode step, or an expert through a conversion, on a CPU.

The bounds are what it takes today: whoever needs more has to say why; one concept in two files is no reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from traced_files import traced

from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.sharding.layout import STORED, Layout
from kimi_k2.sharding.presharder import Presharder


@pytest.mark.parametrize(("name", "most"), [("bf16", 10), ("fp8", 12)])
def test_a_decode_step(name: str, most: int, checkpoints: dict[str, Path]) -> None:
    model = KimiK2ForCausalLM.from_pretrained(checkpoints[name], keep_quantized=True)
    step = DecodeStep(model, new_cache(model, 1, 64))
    token = torch.tensor([3])
    step(token, torch.tensor([0]))
    with traced() as files:
        step(token, torch.tensor([1]))
    assert {"engine/decode_step.py", "engine/layer_step.py", "ops/registry.py"} <= files
    assert len(files) <= most, sorted(files)


@pytest.mark.parametrize(
    ("name", "layout", "most"), [("fp8", Layout(2, 2), 26), ("bf16", Layout(2, 2, "cuda", STORED), 20)]
)
def test_a_conversion(name: str, layout: Layout, most: int, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with traced() as files:
        Presharder(checkpoints[name], tmp_path / "out", layout).run()
    assert {"sharding/convert.py", "sharding/plan.py", "sharding/rank_file.py"} <= files
    assert len(files) <= most, sorted(files)
