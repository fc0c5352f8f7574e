"""vLLM's own K2.5 class on a CPU, its vision tower over our text model: the plain model's tokens for images and video.

Its chat API takes no video: it asks its processor for `split_video_chunks`, which neither 0.24 nor 0.32 has.
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import needs
import pytest
import torch
from heads import write_following_head
from plain_tokens import answers, parts
from vllm_engine import OURS, serve

from kimi_k2.api import KimiK2
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.media.config import IMAGE_FILE, MediaConfig
from kimi_k2.media.patches import Media
from kimi_k2.media.video import process_frames
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

needs.engine("vllm")

NEW_TOKENS = 24
# vLLM's trial run has a picture of 3000 x 3000 pixels.
PROCESSOR = MediaConfig(max_patches=400, max_patches_a_frame=100).to_published_dict()


def write_checkpoint(directory: Path, fmt: str) -> None:
    """Tiny K2.5 with fewer patches an image."""
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2.5"), fmt), seed=4)
    (directory / IMAGE_FILE).write_text(json.dumps({"media_proc_cfg": PROCESSOR}))


def draw_images(directory: Path) -> list[Path]:
    """Noise of three sizes: upright, wide, and over the limit of patches."""
    import numpy as np
    from PIL import Image

    files = []
    for number, size in enumerate([(60, 90), (200, 30), (400, 420)]):
        pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        files.append(directory / f"{number}.png")
        Image.fromarray(pixels).save(files[-1])
    return files


def expected(model: KimiK2, content: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Token ids of a prompt of one message, and the plain model's greedy answer to it."""
    prompt = model.prompt([{"role": "user", "content": content}])
    [tokens] = answers(model, [prompt], SamplingParams(NEW_TOKENS, ignore_eos=True))
    return {"prompt": list(prompt.ids), "tokens": tokens}


def draw_video(directory: Path) -> list[Path]:
    """Six frames at two a second: a chunk of four and one of two."""
    import numpy as np
    from PIL import Image

    drawn = np.random.default_rng(5).integers(0, 256, (6, 70, 100, 3), dtype=np.uint8)
    files = [directory / f"frame{number}.png" for number in range(len(drawn))]
    for path, pixels in zip(files, drawn, strict=True):
        Image.fromarray(pixels).save(path)
    return files


def request(model: KimiK2, prompt: list[int], media: list[list[Path]]) -> dict[str, Any]:
    """For vllm_requests.py: vLLM makes as many of each media token as the image has."""
    pad = parts(model)[1].config.image_token_id
    runs = ((token, len(list(run))) for token, run in itertools.groupby(prompt))
    short = [token for token, count in runs for _ in range(1 if token == pad else count)]
    assert short.count(pad) == len(media)
    paths = [[str(path) for path in files] for files in media]
    return {"prompt": short, "media": paths, "new_tokens": NEW_TOKENS, "arrival": 0}


def check(checkpoint: Path, job: list[dict[str, Any]], wanted: list[Any], out: Path, **options: Any) -> Any:
    """What vllm_requests.py says of these, whose whole prompts and answers are as wanted."""
    usual: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 5, "limit_mm_per_prompt": {"vision_chunk": 3}}
    answer, log = serve(checkpoint, "float32", job, out, skip_tokenizer_init=False, **usual, **options)
    assert OURS in log
    assert (answer["prompts"], answer["tokens"]) == tuple(
        [one[what] for one in wanted] for what in ("prompt", "tokens")
    )
    return answer


SHARED_OUT = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}
SLOW = pytest.mark.skipif(os.environ.get("KIMI_K2_SLOW") != "1", reason="slow: KIMI_K2_SLOW=1")


@pytest.mark.parametrize(("fmt", "options"), [("bf16", {}), ("int4", {}), pytest.param("bf16", SHARED_OUT, marks=SLOW)])
def test_same_tokens_as_the_plain_model(
    fmt: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text alone, one image, three images, one of them again, a video behind an image; all in one batch."""
    import numpy as np
    from PIL import Image

    checkpoint = tmp_path / "model"
    write_checkpoint(checkpoint, fmt)
    first, second, third = draw_images(tmp_path)
    frames = draw_video(tmp_path)

    def decoded(path: Path, config: MediaConfig, *, name: str) -> list[Media]:
        """The frames as they are: vLLM is given chunks, so it decodes no file."""
        assert path == Path("video")
        return process_frames([np.asarray(Image.open(frame)) for frame in frames], 2.0, config, name=name)

    monkeypatch.setattr("kimi_k2.media.prompt.process_video", decoded)
    model = KimiK2.from_pretrained(checkpoint)
    requests: list[dict[str, Any]] = []
    wanted = []
    for images, video in (([], []), ([first], []), ([first, second, third], []), ([third], []), ([first], frames)):
        content = [{"type": "image", "image": str(path)} for path in images]
        content += [{"type": "video", "video": "video"}] if video else []
        wanted.append(expected(model, [*content, {"type": "text", "text": "What?"}]))
        media = [*([path] for path in images), *([video[:4], video[4:]] if video else [])]
        requests.append(request(model, wanted[-1]["prompt"], media))
    check(checkpoint, requests, wanted, tmp_path, **options)


class Tower(torch.nn.Module):
    """As vLLM's ends: the mean of an item's frames, 2 x 2 patches a row."""

    config, merge_kernel_size = SimpleNamespace(hidden_size=8), (2, 2)

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(6, 8)

    def forward(self, pixels: torch.Tensor, grids: torch.Tensor) -> list[torch.Tensor]:
        from vllm.model_executor.models.kimi_k25_vit import tpool_patch_merger

        made: list[torch.Tensor] = tpool_patch_merger(self.embed(pixels), grids)
        return made


@pytest.mark.parametrize("grids", [[[4, 2, 4], [1, 4, 4], [2, 2, 2], [1, 2, 2]], [[4, 4, 2]]])
def test_chunks_that_ranks_share_out(grids: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two ranks, one of which may have nothing to do, gets the rows that one tower makes of all."""
    from kimi_k2.serving.vllm import tower

    held, pixels = Tower().requires_grad_(False), torch.randn(sum(map(math.prod, grids)), 6)
    here, met, sent = threading.local(), threading.Barrier(2), dict[int, torch.Tensor]()

    def gather(rows: torch.Tensor, dim: int) -> torch.Tensor:
        sent[here.rank] = rows
        met.wait(10)
        return torch.cat((sent[0], sent[1]), dim)

    monkeypatch.setattr(tower, "get_tensor_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(tower, "get_tensor_model_parallel_rank", lambda: here.rank)
    monkeypatch.setattr(tower, "tensor_model_parallel_all_gather", gather)

    def run(rank: int) -> tuple[torch.Tensor, ...]:
        here.rank = rank
        return tower.shared_out(held, pixels, grids, rope_type="rope_2d")

    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(run, range(2)):
            torch.testing.assert_close(list(found), held(pixels, torch.tensor(grids)))


def test_drafts_behind_images(tmp_path: Path) -> None:
    """An Eagle3 head that knows what often follows a token; steps of ours, and drafts in them, behind every prompt."""
    checkpoint, head = tmp_path / "model", tmp_path / "head"
    write_checkpoint(checkpoint, "bf16")
    files = draw_images(tmp_path)
    model = KimiK2.from_pretrained(checkpoint)
    wanted, requests = [], []
    for images in ([], files[:1], files, files[2:]):
        content = [{"type": "image", "image": str(path)} for path in images]
        wanted.append(expected(model, [*content, {"type": "text", "text": "What?"}]))
        requests.append(request(model, wanted[-1]["prompt"], [[path] for path in images]))
    replies = [one["tokens"] for one in wanted]
    write_following_head(head, parts(model)[0], replies, dtype=torch.float32, head_dim=64)
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    counts = check(checkpoint, requests, wanted, tmp_path, parts=True, speculative_config=drafts, block_size=32)
    assert counts["verified"] == counts["drafted"] >= NEW_TOKENS / 4
    assert counts["accepted"] > 0


def test_images_over_http(tmp_path: Path) -> None:
    """The openai client's `image_url` parts: vLLM's server makes our prompts of them, and the same tokens."""
    import openai
    from scripted import write_hf_tokenizer
    from vllm_server import serving

    checkpoint = tmp_path / "model"
    write_checkpoint(checkpoint, "int4")
    write_hf_tokenizer(checkpoint)
    files = draw_images(tmp_path)
    model = KimiK2.from_pretrained(checkpoint)
    with serving(checkpoint, tmp_path / "log") as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        for images in ([], files[:1], files):
            sources = [f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" for path in images]
            content: list[Any] = [*({"type": "image_url", "image_url": {"url": source}} for source in sources)]
            content.append({"type": "text", "text": "What?"})
            wanted = expected(model, content)
            answer: Any = client.chat.completions.create(
                model="kimi", messages=[{"role": "user", "content": content}], max_tokens=NEW_TOKENS, temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            assert {"prompt": answer.prompt_token_ids, "tokens": answer.choices[0].token_ids} == wanted
        assert OURS in (tmp_path / "log").read_text()
