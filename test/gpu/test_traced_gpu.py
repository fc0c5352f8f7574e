"""How many of our files are on the path of a decode step on a GPU: while it is replayed, and while it is recorded."""

from __future__ import annotations

import pytest
import torch
from traced_files import traced

from kimi_k2.bench.kernels.model import synthetic_rank
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.sharding.layout import STORED, Layout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("name", ["kimi-k2-instruct-0905", "kimi-k2-thinking"])
def test_files_of_a_decode_step(name: str) -> None:
    config = KimiK2Config.load(name).model_copy(update={"num_hidden_layers": 2})
    model = synthetic_rank(config, Layout(8, target="cuda", experts=STORED), 0, communicate=False)
    step = DecodeStep(model, new_cache(model, 1, 256), graph=True)
    token = torch.tensor([3], device="cuda")
    step(token, torch.tensor([0], device="cuda"))
    with traced() as files:
        step(token, torch.tensor([1], device="cuda"))
    assert files == {"engine/decode_step.py"}
    with traced() as files:
        step.run()
    print(f"\n{len(files)} files: {', '.join(sorted(files))}")
    assert "kernels/attention/entries.py" in files
    assert len(files) <= 48, sorted(files)
