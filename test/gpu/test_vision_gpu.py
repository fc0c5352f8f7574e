"""The vision tower on a GPU: each way of its attention, and the whole tower in BF16, against float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from exact import distance

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.vision import run_pack
from kimi_k2.kernels.vision.packed_attention import packed_attention, rotate_and_pack, scheduled
from kimi_k2.media.patches import Media
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.ops import registry
from kimi_k2.ops.vision import (
    Segments,
    add_layer_norm,
    gelu_linear,
    rotated_attention,
    rotated_qkv,
    segment_attention,
)
from kimi_k2.plan.vision import image_cost
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config
from kimi_k2.vision_config import Grid

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
GRIDS = [Grid(1, 2, 2), Grid(1, 32, 32), Grid(4, 16, 18), Grid(1, 64, 64), Grid(1, 2, 512), Grid(1, 46, 82)]


@pytest.fixture(autouse=True)
def free_choice() -> None:
    registry.load_providers()
    registry.pin("")


@pytest.mark.parametrize(
    "lengths", [[1024] * 4, [7, 1024, 1, 300], [1], [128], [129, 127, 4, 193], [2500, 4000], [4096], [700, 5001]],
    ids=str,
)  # fmt: skip
def test_packed_attention(lengths: list[int]) -> None:
    tokens, scale = sum(lengths), 72**-0.5
    generator = torch.Generator("cuda").manual_seed(tokens)
    qkv = torch.randn(tokens, 3, 16, 72, generator=generator, device="cuda").bfloat16()
    angles = torch.randn(tokens, 1, 36, generator=generator, device="cuda") * 50
    cos, sin = angles.cos(), angles.sin()
    segments = Segments(lengths)
    rotated = [part.bfloat16().float() for part in rotated_qkv(qkv.float(), cos, sin)]
    wanted = segment_attention(rotated[0], rotated[1], rotated[2], segments, scale)
    packed = rotate_and_pack(qkv, cos, sin)
    placed = packed.permute(0, 3, 1, 2, 4).flatten(3)[:, :tokens]
    for found, right in zip(placed, rotated, strict=True):  # a multiply-add may round once
        torch.testing.assert_close(found.float(), right, rtol=0.01, atol=0.02)
    assert not packed[:, :, :, tokens:].any()
    work = scheduled(segments, 16, qkv.device)
    assert work.slots or max(lengths) < 2500, "tiles of the larger ones are split between blocks"
    given = packed, work.parts, work.starts, work.joins, work.slots, tokens, scale
    found = packed_attention(*given)
    error = distance(found, wanted)
    print(f"{lengths}: {error:.1e}")
    assert error < 6e-3
    worst = float((found.float() - wanted).norm(dim=-1).div(wanted.norm(dim=-1)).max())
    assert worst < 0.03, "a row is wrong"
    assert torch.equal(found, packed_attention(*given))


def test_packed_attention_of_scores_that_grow() -> None:
    """The largest score comes last, far above those before: sums so far shrink to nothing."""
    tokens = 700
    qkv = torch.ones(tokens, 3, 16, 72, device="cuda").bfloat16()
    qkv[:, 1] *= torch.linspace(-4, 4, tokens, device="cuda").bfloat16()[:, None, None]
    qkv[:, 2] = torch.randn(tokens, 16, 72, device="cuda").bfloat16()
    cos, sin = torch.ones(tokens, 1, 36, device="cuda"), torch.zeros(tokens, 1, 36, device="cuda")
    segments = Segments([tokens])
    assert rotated_attention.choose(qkv, cos, sin, segments, 1.0).name == "wgmma"
    q, k, v = qkv.float().unbind(1)
    wanted = segment_attention(q, k, v, segments, 1.0)
    assert distance(rotated_attention(qkv, cos, sin, segments, 1.0), wanted) < 6e-3


def test_gelu_in_the_epilogue() -> None:
    x = torch.randn(1000, 1152, device="cuda").bfloat16()
    assert add_layer_norm.choose(x, x, x[0], x[0], 1e-5).name == "triton"
    matrix, shift = torch.randn(4304, 1152, device="cuda").bfloat16() / 34, torch.randn(4304, device="cuda").bfloat16()
    assert gelu_linear.choose(x, matrix, shift).name == "cublaslt"
    wanted = gelu_linear.plain.call(x.double(), matrix.double(), shift.double())
    found = distance(gelu_linear(x, matrix, shift), wanted)
    print(f"GELU in the epilogue: {found:.1e}")
    assert found < 3e-3
    exact = torch.nn.functional.gelu(torch.nn.functional.linear(x.double(), matrix.double(), shift.double()))
    print(f"tanh form to the exact one: {distance(wanted, exact):.1e}")


@pytest.mark.parametrize(("grid", "count"), [(Grid(1, 64, 64), 2), (Grid(1, 128, 128), 1)], ids=str)
def test_memory_is_as_planned(grid: Grid, count: int) -> None:
    """What a pack allocates beside the weights, two layers of the published sizes; arrays of one layer are the peak."""
    config = KimiK2Config.from_preset("kimi-k2.5")
    assert config.vision is not None
    small = config.model_copy(update={"vision": config.vision.model_copy(update={"num_hidden_layers": 2})})
    with torch.device("cuda"):
        model = VisionModel(small, dtype=torch.bfloat16).eval()
    patches = torch.zeros(count, grid.patches, 3, 14, 14, dtype=torch.uint8, device="cuda")
    media = [Media(grid, patch) for patch in patches]
    run_pack(model, media)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run_pack(model, media)
    found = torch.cuda.max_memory_allocated() - before
    planned = count * image_cost(config, grid).activations
    print(f"{count} of {grid}: {found:,} bytes, planned {planned:,}")
    assert found == pytest.approx(planned, rel=0.1)


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
    error = distance(model(pixels, GRIDS), wanted)
    print(f"BF16 tower of 27 layers: relative L2 {error:.2e}, smallest cosine {float(rounded.min()):.5f}")
    print(registry.explain())
    assert error < 0.03
    again = model(pixels, GRIDS)
    assert torch.equal(again, model(pixels, GRIDS)), "not deterministic"
