"""The vision tower on a GPU: each way of its attention, and the whole tower in BF16, against float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kimi_k2.model.vision.model import VisionModel
from kimi_k2.ops import registry
from kimi_k2.ops.vision import Segments, rotated_qkv, segment_attention
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config
from kimi_k2.vision_config import Grid

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GRIDS = [Grid(1, 2, 2), Grid(1, 32, 32), Grid(4, 16, 18), Grid(1, 64, 64), Grid(1, 2, 512), Grid(1, 46, 82)]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double().cpu() - wanted.double().cpu()).norm() / wanted.double().cpu().norm())


@pytest.fixture(autouse=True)
def free_choice() -> None:
    registry.pin("")


@pytest.mark.parametrize("lengths", [[1024] * 4, [7, 1024, 1, 300]], ids=["uniform", "ragged"])
def test_every_attention(lengths: list[int]) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (3, sum(lengths), 16, 72)
    q, k, v = torch.randn(shape, generator=generator, device="cuda").bfloat16().unbind()
    segments = Segments(lengths, "cuda")
    wanted = segment_attention.plain.call(q.float(), k.float(), v.float(), segments, 72**-0.5)
    ran = []
    for entry in (*segment_attention.entries, segment_attention.plain):
        if entry.takes(q, k, v, segments, 72**-0.5):
            error = relative(entry.call(q, k, v, segments, 72**-0.5), wanted)
            print(f"{entry.name}: {error:.1e}")
            assert error < 6e-3, entry.name
            ran.append(entry.name)
    assert ran[-1] == "plain"


def test_rotation() -> None:
    qkv = torch.randn(1000, 3, 16, 72, device="cuda").bfloat16()
    angles = torch.randn(1000, 1, 36, device="cuda") * 100
    wanted = rotated_qkv.plain.call(qkv, angles.cos(), angles.sin())
    assert rotated_qkv.choose(qkv, angles.cos(), angles.sin()).name == "triton"
    found = rotated_qkv(qkv.clone(), angles.cos(), angles.sin())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.01)


def test_whole_tower_in_bf16_against_float32(tmp_path: Path) -> None:
    config = tiny_config("kimi-k2.5", vision={}, hidden_size=7168, num_hidden_layers=2, n_routed_experts=8)
    write_synthetic_checkpoint(tmp_path / "k", config, seed=6)
    pixels = torch.rand(sum(grid.patches for grid in GRIDS), 3, 14, 14, device="cuda") * 2 - 1
    wide = VisionModel.from_pretrained(tmp_path / "k", device="cuda")
    torch.backends.cuda.matmul.allow_tf32 = False
    wanted = wide(pixels, GRIDS)
    del wide
    model = VisionModel.from_pretrained(tmp_path / "k", dtype=torch.bfloat16, device="cuda")
    rounded = torch.nn.functional.cosine_similarity(model(pixels, GRIDS).float(), wanted, dim=-1)
    error = relative(model(pixels, GRIDS), wanted)
    print(f"BF16 tower of 27 layers: relative L2 {error:.2e}, smallest cosine {float(rounded.min()):.5f}")
    print(registry.explain())
    assert error < 0.03
    again = model(pixels, GRIDS)
    assert torch.equal(again, model(pixels, GRIDS)), "not deterministic"
