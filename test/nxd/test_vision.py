"""The vision tower on real NxD: CPU mode on one and two ranks, buckets, and the graphs at real shapes."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import LINES, Stored
from environment import contrib
from graphs import PREFILL, counted, graph_of, of_media
from harness import LAYOUTS, SLOW, TOLERANCE, check, launch, neuron_config, ranks_of
from media import application, drawn, model_of, pixels_of, script_of
from schedule import Script

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, KimiK2Error, MediaError
from kimi_k2.model.vision.model import VisionModel
from kimi_k2.plan.deployment import VISION_ENCODER, load_target
from kimi_k2.plan.memory import tower_live_bytes
from kimi_k2.plan.vision import image_cost, tower_bytes, tower_rank_bytes
from kimi_k2.synthetic.config import TINY_VISION
from kimi_k2.vision_config import Grid

BUCKETS = [[16, 1], [256, 1], [64, 4], [512, 4]]
PACKS = [
    [[1, 2, 2]], [[1, 4, 4]], [[1, 6, 10], [1, 2, 2], [1, 12, 12]], [[4, 4, 4]], [[3, 2, 4], [2, 4, 4]],
    [[4, 8, 6], [1, 2, 6]],
]  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(stored: Stored) -> Path:
    return stored(member="kimi-k2.5", vision={**TINY_VISION, "vt_num_attention_heads": 4}, seed=8)


def tower_of(options: dict[str, Any]) -> dict[str, Any]:
    """Options of a tower over the text's ranks."""
    return {"vision_buckets": BUCKETS, "tp_degree": options["tp_degree"]}


@torch.inference_mode()
def in_cpu_mode(checkpoint: Path, options: dict[str, Any], packs: list[Any], script: Script) -> Any:
    """A job: the tower's features of each pack of pixels and grids, and a script's logits."""
    app = application(checkpoint, {**options, "on_cpu": True}, tower_of(options))
    app.load("")
    return [app.encode(pixels, sizes) for pixels, sizes in packs], script.run(app)


@pytest.mark.parametrize("layout", ["TP1", "TP2", "EP2", "TP4"])
def test_cpu_mode_agrees_with_the_plain_model(checkpoint: Path, layout: str) -> None:
    """Packs of images and video chunks through the tower, and a mixed batch through the whole."""
    draw, plain, worst = torch.Generator().manual_seed(0), VisionModel.from_pretrained(checkpoint), 0.0
    packs = [(pixels_of(sizes, draw), sizes) for pack in PACKS for sizes in [[Grid(*one) for one in pack]]]
    case, options = drawn(checkpoint), neuron_config(*LAYOUTS[layout], 4)
    script = script_of(*case)
    features, logits = launch(in_cpu_mode, checkpoint, options, packs, script, ranks=ranks_of(layout))
    for given, found in zip(packs, features, strict=True):
        wanted = plain(*given)
        assert found.shape == wanted.shape
        worst = max(worst, float((found - wanted).abs().max() / wanted.abs().max()))
    print(f"\n{layout}: largest error over largest value {worst:.1e}")
    assert worst <= TOLERANCE
    check(layout, logits, script.expected(model_of(checkpoint, *case)))


@torch.inference_mode()
def through_compile(
    checkpoint: Path, neuron_config: dict[str, Any], scripts: list[Script], calls: dict[str, Any]
) -> dict[str, Any]:
    """A job: NxDI's own compile and load of its image-to-text base, compiler and device mocked."""
    import mocked_neuron

    mocked_neuron.install()
    files_of_ranks = {"save_sharded_checkpoint": True, "skip_warmup": True}
    compiled_app = application(checkpoint, neuron_config, tower_of(neuron_config), **files_of_ranks)
    with tempfile.TemporaryDirectory() as compiled:
        os.environ["BASE_COMPILE_WORK_DIR"] = f"{compiled}/built/"
        compiled_app.compile(compiled)
        app, errors = type(compiled_app)(compiled), {}
        app.load(compiled)
        for name, (method, given, named) in calls.items():
            with pytest.raises(KimiK2Error) as caught:
                getattr(app, method)(*given, **named)
            errors[name] = str(caught.value)
        files = [str(path.relative_to(compiled)) for path in Path(compiled).rglob("*") if path.is_file()]
        return {"logits": [script.run(app) for script in scripts], "errors": errors, "files": files}


def test_compiled_through_the_image_to_text_base(checkpoint: Path) -> None:
    """Compiled, saved, loaded and run by NxDI's own code with the compiler mocked; two prefill graphs, three calls."""
    prompts, media = drawn(checkpoint)
    text: Any = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9], [7] * 30], [[]] * 4
    # In no order of their lines, with as many rows of media as there are prompts: which have no order of theirs.
    few: Any = [*(prompt[:3] for prompt in prompts[:3]), [7, *[prompts[1][3]] * 4]], [[], [], [], media[2][2:]]
    cases: dict[str, Any] = {"media": (prompts, media), "text alone": text, "lines": few}
    shape, large = (4, 40), Grid(1, 40, 40)
    too_many = {
        "input_ids": torch.zeros(shape, dtype=torch.int64), "attention_mask": torch.ones(shape, dtype=torch.int32),
        "position_ids": torch.arange(40).expand(shape), "vision_embeddings": torch.zeros(4 * 48 + 1, 256),
        "vision_mask": torch.full(shape, -1, dtype=torch.int32),
    }  # fmt: skip
    calls = {
        "fit no compiled bucket": ("encode", (torch.zeros(large.patches, 3, 14, 14), [large]), {}),
        "expected the compiled batch of 4": ("prefill", (prompts[1:3], media[1:3]), {}),
        "rows of images": ("forward", (), too_many),
        "media tokens": ("prefill", ([prompts[1], *prompts[1:]], [[], *media[1:]]), {}),
    }
    options = neuron_config(1, 1, 4, enable_bucketing=True, context_encoding_buckets=[24, 48])
    scripts = {name: script_of(*case) for name, case in cases.items()} | {
        "lines": Script([["media", *few, [2, 0, 3, 1]]], few[0])
    }
    found = launch(through_compile, checkpoint, options, [*scripts.values()], calls)
    for (name, script), logits in zip(scripts.items(), found["logits"], strict=True):
        check(name, logits, script.expected(model_of(checkpoint, *cases[name])))
    weights = "weights/tp0_sharded_checkpoint.safetensors"
    assert {f"{part}_model/{file}" for part in ("text", "vision") for file in ("model.pt", weights)} <= {
        *found["files"]
    }
    assert all(words in message for words, message in found["errors"].items()), found["errors"]


def test_lines_in_any_order_through_the_image_to_text_base(checkpoint: Path) -> None:
    """Continuous batching with images: prompts arrive in any order, steps are of some lines and of all."""
    case = drawn(checkpoint)
    script = script_of(*case, [[2, 0], [3, 0, 2, 1], [1, 3, 2], [3], [0, 1, 2, 3], [1, 2, 3, 0]])
    found = launch(through_compile, checkpoint, neuron_config(1, 1, 4, **LINES), [script], {})
    check("lines in any order", found["logits"][0], script.expected(model_of(checkpoint, *case)))


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
    (graph,) = launch(of_media, patches, frames, ranks, [VISION_ENCODER], way="lowered")
    counts = counted(graph)
    config = KimiK2Config.from_preset("kimi-k2.5")
    side = {256: 16, 1024: 32, 4096: 64, 16384: 128}[patches // frames]
    planned = image_cost(config, Grid(frames, side, side))
    # Every rank computes the patches' embedding; all other products are divided.
    embedding = 2 * patches * 1152 * 588
    assert counts["flops"] == pytest.approx((planned.flops - embedding) / ranks + embedding, rel=0.01)
    # Norms, the patches' embedding and the biases of rows are every rank's; learned positions stay on the host.
    replicated = 1152 * 589 + (27 * 4 + 2 * 2) * 1152 + 27 * 2 * 1152 + 7168
    divided = tower_bytes(config) // 2 - 64 * 64 * 1152 - replicated
    held = sum(size for name, size in counts["counts"].held.items() if not name.startswith("input."))
    assert held == pytest.approx(2 * (divided / ranks + replicated), rel=0.01)
    assert held == pytest.approx(tower_rank_bytes(config, ranks, neuron=True), rel=0.001)
    sums = [(collective["kind"], collective["ranks"], collective["times"]) for collective in counts["collectives"]]
    assert {(kind, over) for kind, over, _ in sums} == {("all-reduce", ranks)}
    assert sum(times for *_, times in sums) == 27 * 2 + 1
    target = replace(load_target("trn2-tp64-ep1-images", config), tower_ranks=ranks, tower_buckets=((patches, frames),))
    assert counts["live"] <= tower_live_bytes(target) <= 1.25 * counts["live"]


@SLOW
def test_prefill_with_media_at_real_shapes() -> None:
    """A row of media for every token, and its index; the products are the text graph's."""
    text = graph_of("trn2-tp64-ep1", PREFILL, member="kimi-k2.5")
    (media,) = launch(of_media, 1024, 1, 16, [PREFILL], way="lowered")
    assert media.bucket == text.bucket
    shapes = {name: list(shape) for name, (_, shape) in media.inputs.items()}
    batch, length = shapes["input.0"]
    assert shapes["input.22"] == [batch * length, 7168]
    assert shapes["input.23"] == [batch, length]
    assert "input.22" not in text.inputs
    of_text, with_media = counted(text), counted(media)
    assert with_media["flops"] == pytest.approx(of_text["flops"], rel=1e-4)
    times, again = (sum(collective["times"] for collective in found["collectives"]) for found in (of_text, with_media))
    assert times == again
