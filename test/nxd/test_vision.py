"""The vision tower on real NxD: CPU mode on one and two ranks, buckets, and the graphs at real shapes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from environment import contrib
from harness import SLOW, counts_of, launch, neuron_config
from plain import decode_step

from kimi_k2.config import KimiK2Config
from kimi_k2.engine.generate import prefill
from kimi_k2.engine.vision import MediaRows
from kimi_k2.errors import ConfigError, MediaError
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.plan.memory import tower_live_bytes
from kimi_k2.plan.target import load_target
from kimi_k2.plan.vision import image_cost, tower_bytes, tower_rank_bytes
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import TINY_VISION, tiny_config, with_format
from kimi_k2.vision_config import Grid

WORKER, LOWERING, TEXT_WORKER = (
    Path(__file__).with_name(f"vision{name}worker.py") for name in ("_", "_lowering_", "_text_")
)
IMAGE_TO_TEXT_WORKER = Path(__file__).with_name("image_to_text_worker.py")
TOLERANCE = 2e-5
BUCKETS = [[16, 1], [256, 1], [64, 4], [512, 4]]
PACKS = [
    [[1, 2, 2]], [[1, 4, 4]], [[1, 6, 10], [1, 2, 2], [1, 12, 12]], [[4, 4, 4]], [[3, 2, 4], [2, 4, 4]],
    [[4, 8, 6], [1, 2, 6]],
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("vision") / "k2.5"
    sizes = {**TINY_VISION, "vt_num_attention_heads": 4}
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2.5", vision=sizes), "bf16"), seed=8)
    return directory


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_cpu_mode_agrees_with_the_plain_tower(checkpoint: Path, tmp_path: Path, ranks: int) -> None:
    job = {"checkpoint": checkpoint, "neuron_config": {"tp_degree": ranks}, "buckets": BUCKETS, "packs": PACKS}
    plain = VisionModel.from_pretrained(checkpoint)
    worst = 0.0
    for grids, (pixels, found) in zip(PACKS, launch(job, tmp_path, WORKER), strict=True):
        wanted = plain(pixels, [Grid(*grid) for grid in grids])
        assert found.shape == wanted.shape
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    print(f"\nTP{ranks}: largest error over largest value {worst:.1e}")
    assert worst <= TOLERANCE


def drawn_case(checkpoint: Path) -> dict[str, Any]:
    """Text, one image, and a video chunk beside two images; six tokens that decode is fed."""
    config = KimiK2Config.from_pretrained(checkpoint)
    assert config.vision is not None
    token, generator = config.vision.image_token_id, torch.Generator().manual_seed(3)
    grids = [[], [Grid(1, 4, 6)], [Grid(3, 2, 4), Grid(1, 2, 2), Grid(1, 4, 4)], []]
    prompts, media = [], []
    for row, own in enumerate(grids):
        prompts.append(torch.randint(0, 512, (3 + row,), generator=generator).tolist())
        media.append([(torch.rand(grid.patches, 3, 14, 14, generator=generator) * 2 - 1, tuple(grid)) for grid in own])
        for grid in own:
            prompts[-1] += [*[token] * grid.tokens(), 5]
    forced = torch.randint(0, 512, (4, 6), generator=generator).tolist()
    return {"prompts": prompts, "media": media, "forced": forced}


def plain_logits(checkpoint: Path, case: dict[str, Any]) -> torch.Tensor:
    """Of prefill and of every forced step, [steps, B, vocab]."""
    config = KimiK2Config.from_pretrained(checkpoint)
    assert config.vision is not None
    prompts, forced = case["prompts"], case["forced"]
    tower, plain = VisionModel.from_pretrained(checkpoint), KimiK2ForCausalLM.from_pretrained(checkpoint)
    features = [[tower(pixels, [Grid(*grid)]) for pixels, grid in own] for own in case["media"]]
    rows = MediaRows.of(prompts, features, config.vision.media_token_ids)
    cache = plain.new_cache(4, max(map(len, prompts)) + 6)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    wanted = [prefill(plain, prompts, cache, media=rows)]
    for step in range(len(forced[0])):
        tokens = torch.tensor([row[step] for row in forced])
        wanted.append(decode_step(plain, tokens, lengths + step, cache))
    return torch.stack(wanted)


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 2)])
def test_whole_model_with_media(checkpoint: Path, tmp_path: Path, tp: int, ep: int) -> None:
    """A mixed batch against the plain model."""
    case = drawn_case(checkpoint)
    torch.save(case, tmp_path / "case.pt")
    options = neuron_config(tp, ep, 4)
    job = {"checkpoint": checkpoint, "neuron_config": options, "buckets": BUCKETS, "case": str(tmp_path / "case.pt")}
    found = launch(job, tmp_path, TEXT_WORKER)
    worst = float((found - plain_logits(checkpoint, case)).abs().max())
    print(f"\nTP{tp} EP{ep}: max |logit difference| {worst:.1e} on logits up to {float(found.abs().max()):.2f}")
    assert worst <= TOLERANCE


def test_compiled_through_the_image_to_text_base(checkpoint: Path, tmp_path: Path) -> None:
    """Compiled, saved, loaded and run by NxDI's own code with the compiler mocked; two prefill graphs, three calls."""
    case = drawn_case(checkpoint)
    text = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9], [7] * 30]
    shape = 4, 40
    too_many = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "attention_mask": torch.ones(shape, dtype=torch.int32),
        "position_ids": torch.arange(40).expand(shape),
        "vision_embeddings": torch.zeros(4 * 48 + 1, 256),
        "vision_mask": torch.full(shape, -1, dtype=torch.int32),
    }
    torch.save({**case, "text": text, "too_many": too_many}, tmp_path / "case.pt")
    options = neuron_config(1, 1, 4, enable_bucketing=True, context_encoding_buckets=[24, 48])
    job = {"checkpoint": checkpoint, "neuron_config": options, "buckets": BUCKETS, "case": str(tmp_path / "case.pt")}
    found = launch(job, tmp_path, IMAGE_TO_TEXT_WORKER)
    worst = float((found["logits"] - plain_logits(checkpoint, case)).abs().max())
    wanted = plain_logits(checkpoint, {"prompts": text, "media": [[]] * 4, "forced": [[]] * 4})
    worst_text = float((found["text"] - wanted[0]).abs().max())
    print(f"\nthrough compile and load: {worst:.1e}; text alone {worst_text:.1e}")
    assert max(worst, worst_text) <= TOLERANCE
    weights = "weights/tp0_sharded_checkpoint.safetensors"
    assert {f"{part}_model/{file}" for part in ("text", "vision") for file in ("model.pt", weights)} <= {
        *found["files"]
    }
    errors = found["errors"]
    assert "fit no compiled bucket" in errors["bucket"]
    assert "expected the compiled batch of 4" in errors["batch"]
    assert "rows of images" in errors["rows"]
    assert "media tokens" in errors["tokens"]


def test_lines_in_any_order_through_the_image_to_text_base(checkpoint: Path, tmp_path: Path) -> None:
    """Continuous batching with images: prompts arrive in any order, steps are of some lines and of all."""
    case = drawn_case(checkpoint)
    steps = [[2, 0], [3, 0, 2, 1], [1, 3, 2], [3], [0, 1, 2, 3], [1, 2, 3, 0]]
    torch.save({**case, "arrival": [2, 0, 3, 1], "steps": steps}, tmp_path / "case.pt")
    lines = {"is_continuous_batching": True, "ctx_batch_size": 1, "tkg_batch_size": 4, "max_batch_size": 4}
    options = neuron_config(1, 1, 4, **lines)
    job = {"checkpoint": checkpoint, "neuron_config": options, "buckets": BUCKETS, "case": str(tmp_path / "case.pt")}
    found, plain = launch(job, tmp_path, IMAGE_TO_TEXT_WORKER), plain_logits(checkpoint, case)
    wanted = torch.stack([plain[step, line] for line, step in found["of"]])
    worst = float((found["logits"] - wanted).abs().max())
    print(f"\nlines in any order: {worst:.1e}")
    assert worst <= TOLERANCE


def test_the_smallest_bucket_that_fits() -> None:
    vision = contrib("vision")
    config = KimiK2Config.from_preset("kimi-k2.5").vision
    buckets = [vision.VisionBucket(*bucket) for bucket in BUCKETS]
    chosen = [vision.choose_bucket([Grid(*grid) for grid in pack], buckets, config) for pack in PACKS]
    assert [(bucket.patches, bucket.frames) for bucket in chosen] == [
        (16, 1), (16, 1), (256, 1), (64, 4), (512, 4), (512, 4)
    ]  # fmt: skip
    for pack in ([Grid(1, 18, 16)] * 2, [Grid(4, 12, 12)]):
        with pytest.raises(MediaError, match="fit no compiled bucket"):
            vision.choose_bucket(pack, buckets, config)
    with pytest.raises(MediaError, match="multiples"):
        vision.choose_bucket([Grid(1, 3, 4)], buckets, config)


def test_what_cannot_be_cut() -> None:
    config = KimiK2Config.from_preset("kimi-k2.5")
    for ranks in (3, 32):
        with pytest.raises(ConfigError, match="does not divide"), torch.device("meta"):
            contrib("vision").KimiK25VisionGraph(config, ranks, torch.float32)


@pytest.mark.parametrize(
    ("ranks", "patches", "frames"),
    [
        (4, 256, 1), (16, 256, 1), (4, 4096, 4), pytest.param(4, 1024, 1, marks=SLOW),
        pytest.param(4, 4096, 1, marks=SLOW), pytest.param(16, 16384, 1, marks=SLOW),
    ],
)  # fmt: skip
def test_graphs_at_real_shapes_cost_what_the_planner_says(ranks: int, patches: int, frames: int) -> None:
    counts = counts_of(LOWERING, ranks, patches, frames)
    config = KimiK2Config.from_preset("kimi-k2.5")
    side = {256: 16, 1024: 32, 4096: 64, 16384: 128}[patches // frames]
    planned = image_cost(config, Grid(frames, side, side))
    # Every rank computes the patches' embedding; all other products are divided.
    embedding = 2 * patches * 1152 * 588
    assert counts["flops"] == pytest.approx((planned.flops - embedding) / ranks + embedding, rel=0.01)
    # Norms, the patches' embedding and the biases of rows are every rank's; learned positions stay on the host.
    replicated = 1152 * 589 + (27 * 4 + 2 * 2) * 1152 + 27 * 2 * 1152 + 7168
    divided = tower_bytes(config) // 2 - 64 * 64 * 1152 - replicated
    assert counts["held"] == pytest.approx(2 * (divided / ranks + replicated), rel=0.01)
    assert counts["held"] == pytest.approx(tower_rank_bytes(config, ranks, neuron=True), rel=0.001)
    assert counts["kinds"] == {f"all-reduce {ranks}": 27 * 2 + 1}
    target = replace(load_target("trn2-tp64-ep1-images", config), tower_ranks=ranks, tower_buckets=((patches, frames),))
    assert counts["live"] <= tower_live_bytes(config, target) <= 1.25 * counts["live"]


@SLOW
def test_prefill_with_media_at_real_shapes() -> None:
    """A row of media for every token, and its index; the products are the text graph's."""
    found = counts_of(LOWERING, "trn2-tp64-ep1", 2)
    text, media = found["text"], found["media"]
    assert media["bucket"] == text["bucket"]
    batch, length = media["inputs"]["input.0"]
    assert media["inputs"]["input.22"] == [batch * length, 7168]
    assert media["inputs"]["input.23"] == [batch, length]
    assert "input.22" not in text["inputs"]
    assert media["flops"] == pytest.approx(text["flops"], rel=1e-4)
    assert media["collectives"] == text["collectives"]
