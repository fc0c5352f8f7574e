"""vLLM's own K2.5 class, its vision tower over our text model: the plain model's tokens for images and video.

On a GPU answers are float32's but for rounding, at a rank's sizes. vLLM's chat API takes no video: it asks its
processor for `split_video_chunks`, which 0.32 has not.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from engines import ON_GPU, OURS, SLOW, serve
from heads import write_following_head
from judge import ROUNDING, SIZES, Judge
from pictures import chunks_of_frames
from plain_tokens import answers, media_rows, parts
from scripted import write_hf_tokenizer

from kimi_k2.api import KimiK2, Prompt
from kimi_k2.config import KimiK2Config
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.media.config import IMAGE_FILE, MediaConfig
from kimi_k2.media.patches import Media
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

engines.need("vllm")
if importlib.import_module("vllm").__version__.startswith("0.24"):
    pytest.skip("vLLM 0.24 takes the image processor that a checkpoint brings along", allow_module_level=True)

NEW_TOKENS = 24
GREEDY = SamplingParams(NEW_TOKENS, ignore_eos=True)
# vLLM's trial run has a picture of 3000 x 3000 pixels.
LIMITS: dict[str, Any] = {"max_patches": 400, "max_patches_a_frame": 100}
# Heads of the published tower's size, which its attention's kernels take; few of them, and few layers.
TOWER = {
    "vt_hidden_size": 288, "mm_hidden_size": 288, "vt_num_attention_heads": 4, "vt_num_hidden_layers": 2,
    "vt_intermediate_size": 256, "init_pos_emb_height": 16, "init_pos_emb_width": 16,
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": False, "max_model_len": 512, "max_num_seqs": 5,
    "limit_mm_per_prompt": {"vision_chunk": 3},
}  # fmt: skip
GPU_OPTIONS: dict[str, Any] = {
    "enforce_eager": False, "kv_cache_memory_bytes": 200_000_000, "gpu_memory_utilization": 0.1,
    "mm_encoder_attn_backend": "TORCH_SDPA",
}  # fmt: skip
SHARED_OUT = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": "data"}
SIZES_OF_FILES = {"upright": (60, 90), "wide": (200, 30), "large": (400, 420)}  # the last is over the limit of patches


def write_checkpoint(directory: Path, fmt: str, on_gpu: bool = False) -> None:
    """Tiny K2.5, on a GPU with a rank's sizes."""
    sizes: dict[str, Any] = {}
    if on_gpu:
        published = KimiK2Config.load("kimi-k2.5")
        kept = ("hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        sizes = {name: getattr(published, name) for name in (*kept, "num_experts_per_tok")} | SIZES
    write_synthetic_checkpoint(directory, with_format(tiny_config("kimi-k2.5", vision=TOWER, **sizes), fmt), seed=4)
    fields = {"media_proc_cfg": MediaConfig(**LIMITS).to_published_dict()}
    (directory / IMAGE_FILE).write_text(json.dumps(fields))


def draw(directory: Path, name: str, size: tuple[int, int], frames: int = 1) -> list[Path]:
    """Files of noise."""
    import numpy as np
    from PIL import Image

    drawn = np.random.default_rng(sum(size)).integers(0, 256, (frames, *size, 3), dtype=np.uint8)
    files = [directory / f"{name}{number}.png" for number in range(frames)]
    for path, pixels in zip(files, drawn, strict=True):
        Image.fromarray(pixels).save(path)
    return files


def draw_images(directory: Path) -> list[Path]:
    return [path for name, size in SIZES_OF_FILES.items() for path in draw(directory, name, size)]


def prompt_of(model: KimiK2, images: list[Path], video: bool = False) -> Prompt:
    content: list[Any] = [{"type": "image", "image": str(path)} for path in images]
    content += [{"type": "video", "video": "video"}] * video
    return model.prompt([{"role": "user", "content": [*content, {"type": "text", "text": "What?"}]}])


def request(model: KimiK2, prompt: Prompt, media: list[list[Path]]) -> dict[str, Any]:
    """For vllm_requests.py: vLLM makes as many of each media token as the image has."""
    pad = parts(model)[1].config.image_token_id
    runs = ((token, len(list(run))) for token, run in itertools.groupby(prompt.ids))
    short = [token for token, count in runs for _ in range(1 if token == pad else count)]
    assert short.count(pad) == len(media)
    paths = [[str(path) for path in files] for files in media]
    return {"prompt": short, "media": paths, "new_tokens": NEW_TOKENS, "arrival": 0}


DRAFTS = {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}, "block_size": 32}
ROWS: list[Any] = [
    ("bf16", {}, False), ("int4", {}, False), ("bf16", DRAFTS, False),
    pytest.param("bf16", SHARED_OUT, False, marks=SLOW),
    pytest.param("int4", GPU_OPTIONS, True, marks=engines.on_hoppers()),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "options", "on_gpu"), ROWS)
def test_same_tokens_as_the_plain_model(
    fmt: str, options: dict[str, Any], on_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text alone, one image, three images, one of them again, a video behind an image; all in one batch.

    Also with an Eagle3 head that knows what often follows a token: steps of ours, and drafts in them. On a GPU but for
    rounding, of which an answer to another image is not.
    """
    import numpy as np
    from PIL import Image

    write_checkpoint(tmp_path / "model", fmt, on_gpu)
    (first, second, third), frames = draw_images(tmp_path), draw(tmp_path, "frame", (100, 70), 6)

    def decoded(path: Path, config: MediaConfig, *, name: str) -> list[Media]:
        """The frames as they are, two a second: vLLM is given chunks of four and two, so it decodes no file."""
        assert path == Path("video")
        return chunks_of_frames([np.asarray(Image.open(frame)) for frame in frames], 2.0, config)

    monkeypatch.setattr("kimi_k2.media.prompt.process_video", decoded)
    model = KimiK2.from_pretrained(tmp_path / "model", backend="cuda" if on_gpu else "cpu", dtype="float32")
    prompts, job = list[Prompt](), list[Any]()
    for images, video in (([], []), ([first], []), ([first, second, third], []), ([third], []), ([first], frames)):
        prompts.append(prompt_of(model, images, bool(video)))
        media = [*([path] for path in images), *([video[:4], video[4:]] if video else [])]
        job.append(request(model, prompts[-1], media))
    given, drafted = {**OPTIONS, **options}, "speculative_config" in options
    wanted = [] if on_gpu else answers(model, prompts, GREEDY)
    if drafted:
        write_following_head(tmp_path / "head", parts(model)[0], wanted, dtype=torch.float32, head_dim=64)
        given["speculative_config"] = {**options["speculative_config"], "model": str(tmp_path / "head")}
    dtype = "bfloat16" if on_gpu else "float32"
    answer, log = serve(tmp_path / "model", dtype, job, tmp_path, told={"parts": drafted}, **given)
    assert OURS in log
    assert answer["prompts"] == [list(prompt.ids) for prompt in prompts]
    assert not drafted or (answer["verified"] == answer["drafted"] >= NEW_TOKENS / 4 and answer["accepted"] > 0)
    if not on_gpu:
        assert answer["tokens"] == wanted
        return
    judge, answered = Judge(tmp_path / "model"), answer["tokens"]
    another = prompt_of(model, draw(tmp_path, "another", (90, 60)))
    gaps = [
        float(judge.gaps(list(prompt.ids), tokens, media_rows(model, [prompt])).mean())
        for prompt, tokens in zip([*prompts, another], [*answered, answered[1]], strict=True)
    ]
    print(f"largest mean gap {max(gaps[:-1]):.4f}")
    assert max(gaps[:-1]) < ROUNDING
    assert gaps[-1] > 2 * gaps[1] + 0.01


@pytest.mark.skipif(ON_GPU, reason="answers in float32")
def test_images_over_http(tmp_path: Path) -> None:
    """The openai client's `image_url` parts: vLLM's server makes our prompts of them, and the same tokens."""
    import openai

    write_checkpoint(tmp_path / "model", "int4")
    write_hf_tokenizer(tmp_path / "model")
    files, model = draw_images(tmp_path), KimiK2.from_pretrained(tmp_path / "model")
    with engines.serving(tmp_path / "model", tmp_path / "log") as url:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        for images in ([], files[:1], files):
            sources = [f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}" for path in images]
            content: list[Any] = [*({"type": "image_url", "image_url": {"url": source}} for source in sources)]
            content.append({"type": "text", "text": "What?"})
            answer: Any = client.chat.completions.create(
                model="kimi", messages=[{"role": "user", "content": content}], max_tokens=NEW_TOKENS, temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            prompt = prompt_of(model, images)
            assert answer.prompt_token_ids == list(prompt.ids)
            assert [answer.choices[0].token_ids] == answers(model, [prompt], GREEDY)
        assert OURS in (tmp_path / "log").read_text()
