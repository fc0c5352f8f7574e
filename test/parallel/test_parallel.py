"""Two and four gloo processes, each with its file of a conversion, against the plain model in one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parallel.apply import parallelize
from kimi_k2.parallel.load import load_rank
from kimi_k2.sharding.plan import Layout
from kimi_k2.sharding.presharder import Presharder

WORKER = Path(__file__).with_name("worker.py")


def convert(source: Path, out: Path, layout: Layout) -> Path:
    Presharder(source, out, layout).run()
    return out


@pytest.mark.parametrize(
    ("source", "moe_tp", "moe_ep"), [("wide", 2, 1), ("thinking", 2, 1), ("fp8", 1, 2), ("thinking", 2, 2)]
)
def test_ranks_agree_with_the_plain_model(
    checkpoints: dict[str, Path], wide: Path, tmp_path: Path, source: str, moe_tp: int, moe_ep: int
) -> None:
    """FP8 and INT4; tensor parallel, expert parallel and both; prefill and decode."""
    directory = wide if source in ("wide", "fp8") else checkpoints[source]
    layout = Layout(moe_tp, moe_ep, target="cuda", experts="stored")
    converted, out = convert(directory, tmp_path / "ranks", layout), tmp_path / "logits.pt"
    arguments = [directory, converted, moe_tp, moe_ep, tmp_path / "rendezvous", out]
    command = [[sys.executable, WORKER, rank, *arguments] for rank in range(layout.ranks)]
    ranks = [subprocess.Popen([str(part) for part in one]) for one in command]
    assert [rank.wait(timeout=600) for rank in ranks] == [0] * layout.ranks
    ids, logits = torch.load(out)
    wanted = KimiK2ForCausalLM.from_pretrained(directory)(ids)
    assert logits.shape == wanted.shape
    assert (logits - wanted).norm() / wanted.norm() < 2e-5


def test_refusals_name_what_differs(wide: Path, tmp_path: Path) -> None:
    config = KimiK2Config.from_pretrained(wide)
    layout = Layout(2, target="cuda", experts="stored")
    convert(wide, tmp_path, layout)
    with pytest.raises(ConfigError, match="moe_tp"):
        load_rank(tmp_path, config, Layout(1, 2, target="cuda", experts="stored"), 0)
    with torch.device("meta"):
        model = KimiK2ForCausalLM(config)
    with pytest.raises(ConfigError, match="target"):
        parallelize(model, Layout(2), 0, communicate=False)
    with torch.device("meta"):
        model = KimiK2ForCausalLM(config)
    with pytest.raises(ConfigError, match="keep_quantized"):
        parallelize(model, Layout(1, target="cuda", experts="stored"), 0, communicate=False)
