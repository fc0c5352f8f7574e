"""A conversion for one rank: no process group, logits of the checkpoint; INT4 whose down_proj stays BF16 too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.moe import Experts
from kimi_k2.parallel.load import load_rank
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_bf16_down


@pytest.mark.parametrize("source", ["fp8", "thinking", "mixed"])
@torch.inference_mode()
def test_one_ranks_file_has_the_checkpoints_logits(source: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    if source == "mixed":
        checkpoints = {"mixed": tmp_path / "source"}
        config = with_bf16_down(tiny_config("kimi-k2-thinking", moe_intermediate_size=128))
        write_synthetic_checkpoint(tmp_path / "source", config)
    layout = Layout(1, target="cuda", experts="stored")
    Presharder(checkpoints[source], tmp_path / "ranks", layout).run()
    plain = KimiK2ForCausalLM.from_pretrained(checkpoints[source])
    model = load_rank(tmp_path / "ranks", plain.config, layout, 0, dtype=torch.float32)
    held = {name for module in model.modules() if isinstance(module, Experts) for name in module._buffers}
    assert ("down_proj" in held and "gate_up_proj_packed" in held) == (source == "mixed")
    ids = torch.randint(0, plain.config.vocab_size, (2, 7), generator=torch.Generator().manual_seed(4))
    assert torch.equal(model(ids), plain(ids))
