"""INT4 experts as the model holds them: which kernel takes them, and their values in the kernel's order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import KernelError
from kimi_k2.kernels.experts import w4a16 as moe_w4a16
from kimi_k2.model.decoder import KimiK2ForCausalLM, load_checkpoint
from kimi_k2.model.moe import Experts
from kimi_k2.ops import registry
from kimi_k2.ops.linear import dequantize
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config


def config_of(mixed: bool) -> KimiK2Config:
    config = tiny_config("kimi-k2-thinking", hidden_size=256, moe_intermediate_size=128, num_hidden_layers=2)
    return Layout(1, target="cuda", experts="w2_bf16").held(config) if mixed else config


def experts_of(model: KimiK2ForCausalLM) -> Experts:
    return next(module for module in model.modules() if isinstance(module, Experts))


@pytest.fixture(scope="module", params=[False, True], ids=["int4", "w2_bf16"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("int4")
    write_synthetic_checkpoint(directory, config_of(request.param))
    return directory


@torch.inference_mode()
def test_the_kernels_order_changes_no_value(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ordered in place, an expert still has the checkpoint's weights, and the model the logits of the plain one."""
    plain = KimiK2ForCausalLM.from_pretrained(source)
    kept = KimiK2ForCausalLM.from_pretrained(source, keep_quantized=True)
    experts, wanted = experts_of(kept), experts_of(plain)
    packed = "down_proj_packed" in experts._buffers
    assert packed == ("down_proj" not in experts._buffers)
    if not packed:
        experts.down_proj = experts.down_proj.bfloat16()
    before = {name: tensor.clone() for name, tensor in experts.named_buffers()}
    monkeypatch.setattr(moe_w4a16, "supports", lambda *_: True)
    experts.prepare(torch.bfloat16)
    for name, tensor in experts.named_buffers():
        assert not torch.equal(tensor, before[name]), name
    for expert in range(experts.num_experts):
        for target in ("gate_up_proj", "down_proj"):
            held = dequantize(experts._stored(target).expert(expert), torch.float32)
            assert torch.equal(held, getattr(wanted, target)[expert])
    ids = torch.randint(0, kept.config.vocab_size, (2, 5), generator=torch.Generator().manual_seed(3))
    assert torch.equal(kept(ids), plain(ids))
    with pytest.raises(KernelError, match="load before"):
        load_checkpoint(kept, CheckpointReader.for_config(source, kept.config))


def test_the_checkpoints_format_chooses_the_kernel(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a Hopper GPU would be: INT4 with groups of 32 is taken, second projection packed or BF16, of 16 not."""
    monkeypatch.setattr(moe_w4a16, "supports", lambda *_: True)
    model = KimiK2ForCausalLM.from_pretrained(source, dtype=torch.bfloat16, keep_quantized=True)
    experts = experts_of(model)
    x, indices, weights = torch.zeros(1, 256).bfloat16(), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 2)

    def takers(x: torch.Tensor, experts: Experts) -> list[str]:
        given = x, experts.stored(), indices, weights
        return [entry.name for entry in registry.TABLE["routed_experts"].entries if entry.takes(*given)]

    assert takers(x, experts) == []
    experts.prepare(torch.float32)
    assert takers(x, experts) == []  # for other tokens than BF16 nothing is put into order
    experts.prepare(torch.bfloat16)
    assert takers(x, experts) == ["moe_w4a16"]
    assert takers(x.float(), experts) == []
    for size in (16, 128):  # wider groups go with a packed second projection alone
        for target, held in experts._formats.items():
            assert isinstance(held, (Int4GroupFormat, type(None)))
            experts._formats[target] = held and held.model_copy(update={"group_size": size})
        assert takers(x, experts) == (["moe_w4a16"] if size > 16 and None not in experts._formats.values() else [])
    plain = experts_of(KimiK2ForCausalLM.from_pretrained(source, dtype=torch.bfloat16))
    plain.prepare(torch.bfloat16)
    assert takers(x, plain) == []
