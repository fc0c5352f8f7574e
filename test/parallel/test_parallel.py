"""Two and four processes, each with its file of a conversion, against the plain model in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exact import distance
from forked import python
from processes import run_together
from torch import Tensor

from kimi_k2.bench.kernels.model import decide_routes
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parallel.apply import load_rank, parallelize
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint

WORKER = Path(__file__).with_name("worker.py")


def convert(source: Path, out: Path, layout: Layout) -> Path:
    Presharder(source, out, layout).run()
    return out


def run_ranks(source: Path, work: Path, layout: Layout, where: str) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of each dtype: token ids, the ranks' logits for all, and their DecodeStep's for the last three."""
    converted, out = convert(source, work / "ranks", layout), work / "logits.pt"
    arguments = [source, converted, layout.moe_tp, layout.moe_ep, work / "rendezvous", out, where]
    run_together([[*python(), WORKER, "generate", rank, *arguments] for rank in range(layout.ranks)], timeout=600)
    return [(ids, logits, stepped) for ids, logits, stepped in torch.load(out)]


@pytest.mark.parametrize(
    ("source", "moe_tp", "moe_ep"), [("wide", 2, 1), ("thinking", 2, 1), ("fp8", 1, 2), ("thinking", 2, 2)]
)
def test_ranks_agree_with_the_plain_model(
    checkpoints: dict[str, Path], wide: Path, tmp_path: Path, source: str, moe_tp: int, moe_ep: int
) -> None:
    """FP8 and INT4; tensor parallel, expert parallel and both; prefill and decode, plain and by DecodeStep."""
    directory = wide if source in ("wide", "fp8") else checkpoints[source]
    layout = Layout(moe_tp, moe_ep, target="cuda", experts="stored")
    ((ids, logits, stepped),) = run_ranks(directory, tmp_path, layout, "cpu:float32")
    wanted = KimiK2ForCausalLM.from_pretrained(directory)(ids).double()
    assert logits.shape == wanted.shape
    assert distance(logits, wanted) < 2e-5
    assert distance(stepped, wanted[:, -3:]) < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize(("moe_tp", "moe_ep"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_on_gpus(for_gpus: KimiK2Config, moe_tp: int, moe_ep: int, tmp_path: Path) -> None:
    """NCCL, sums over peer memory and CUDA graphs against float64: float32 exactly, BF16 with the kernels."""
    layout = Layout(moe_tp, moe_ep, target="cuda", experts="stored")
    if torch.cuda.device_count() < layout.ranks:
        pytest.skip(f"needs {layout.ranks} GPUs")
    write_synthetic_checkpoint(tmp_path / "source", for_gpus)
    exact = decide_routes(KimiK2ForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float64))
    # With kernels the FP8 experts of more than four tokens round activations to e4m3.
    limits = {"float32": 1e-5, "bfloat16": 0.05}
    found = run_ranks(tmp_path / "source", tmp_path, layout, "cuda:" + ",".join(limits))
    for (dtype, limit), (ids, logits, stepped) in zip(limits.items(), found, strict=True):
        wanted = exact(ids)
        errors = distance(logits, wanted), distance(stepped, wanted[:, -3:])
        method = for_gpus.quantization and for_gpus.quantization.name
        print(f"\n{method} {moe_tp} x {moe_ep} {dtype}: {errors[0]:.2e}, DecodeStep {errors[1]:.2e}")
        assert max(errors) < limit


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
