"""vLLM's own K2.5 class on a GPU, its tower over our text model: float32's tokens but for rounding, images and video.

Up to 0.24 vLLM takes the image processor from the checkpoint; media_code.py stands for the published one. With
KIMI_K2_SLOW=1 it runs on a CPU too, a tiny model.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import needs
import pytest
import torch
from judge import ROUNDING, SIZES
from plain_tokens import parts
from test_vllm_images import PROCESSOR
from vllm_engine import serve

from kimi_k2.api import KimiK2
from kimi_k2.config import KimiK2Config
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config
from kimi_k2.tokenization.special_tokens import special_tokens

needs.engine("vllm")
ON_GPU = needs.hoppers()
pytestmark = pytest.mark.skipif(
    not ON_GPU and os.environ.get("KIMI_K2_SLOW") != "1",
    reason="needs a Hopper GPU, nvcc; KIMI_K2_SLOW=1 runs on a CPU",
)

HERE = Path(__file__).parent
NEW_TOKENS = 32
# Heads of the published tower's size, which its attention's kernels take; few of them, and few layers.
TOWER = {
    "vt_hidden_size": 288, "mm_hidden_size": 288, "vt_num_attention_heads": 4, "vt_num_hidden_layers": 2,
    "vt_intermediate_size": 256, "init_pos_emb_height": 16, "init_pos_emb_width": 16,
}  # fmt: skip
LIMITS = {
    "max_patches": PROCESSOR["in_patch_limit"], "max_patches_a_frame": PROCESSOR["in_patch_limit_each_frame"],
}  # fmt: skip
OPTIONS: dict[str, Any] = {
    "trust_remote_code": True, "skip_tokenizer_init": False, "max_model_len": 512, "max_num_seqs": 5,
    "limit_mm_per_prompt": {"vision_chunk": 3},
}  # fmt: skip
GPU_OPTIONS: dict[str, Any] = {
    "enforce_eager": False, "kv_cache_memory_bytes": 200_000_000, "gpu_memory_utilization": 0.1,
    "mm_encoder_attn_backend": "TORCH_SDPA",
}  # fmt: skip


def config() -> KimiK2Config:
    """K2.5 in INT4 with a rank's sizes of the language model; on a CPU a tiny one."""
    if not ON_GPU:
        return tiny_config("kimi-k2.5", vision=TOWER)
    published = KimiK2Config.load("kimi-k2.5")
    sizes = {name: getattr(published, name) for name in ("hidden_size", "q_lora_rank", "kv_lora_rank",
             "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts_per_tok")}  # fmt: skip
    return tiny_config("kimi-k2.5", vision=TOWER, **{**sizes, **SIZES})


def write_checkpoint(directory: Path) -> None:
    """With the tower's sizes under transformers' names too, which vLLM reads, and an image processor of its own."""
    write_synthetic_checkpoint(directory, config(), seed=4)
    path = directory / "config.json"
    raw = json.loads(path.read_text())
    tower = raw["vision_config"]
    for name in ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers"):
        tower[name] = tower[f"vt_{name}"]
    for name in ("height", "width", "time"):
        tower[f"pos_emb_{name}"] = tower[f"init_pos_emb_{name}"]
    raw["projection_hidden_size"] = tower["vt_hidden_size"]
    raw["image_token_id"] = raw["media_placeholder_token_id"]
    raw |= {"use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>"}
    path.write_text(json.dumps(raw))
    fields = {
        "auto_map": {"AutoImageProcessor": "media_code.MediaCode"}, "image_processor_type": "MediaCode",
        "media_config": LIMITS, "media_proc_cfg": PROCESSOR,
    }  # fmt: skip
    (directory / "preprocessor_config.json").write_text(json.dumps(fields))
    shutil.copy(HERE / "media_code.py", directory)


def draw(directory: Path) -> dict[str, list[Path]]:
    """Noise: an upright image, a wide one, one over the limit of patches; two frames of a video."""
    import numpy as np
    from PIL import Image

    files: dict[str, list[Path]] = {}
    sizes = {"upright": [(60, 90)], "wide": [(200, 30)], "large": [(400, 420)], "video": [(70, 100)] * 2}
    for seed, (name, shapes) in enumerate(sizes.items()):
        generator = np.random.default_rng(seed)
        files[name] = [directory / f"{name}{number}.png" for number in range(len(shapes))]
        for path, shape in zip(files[name], shapes, strict=True):
            Image.fromarray(generator.integers(0, 256, (*shape, 3), dtype=np.uint8)).save(path)
    return files


def prompts(files: dict[str, list[Path]], pad: int) -> list[dict[str, Any]]:
    """Text alone; one image; three; a video behind an image; an image again, which vLLM need not encode again."""
    wanted: list[dict[str, Any]] = []
    for number, names in enumerate(([], ["upright"], ["upright", "wide", "large"], ["wide", "video"], ["upright"])):
        ids = [20 + number, 30, 31]
        ids += [pad, 40 + number] * len(names)
        media = [[str(path) for path in files[name]] for name in names]
        wanted.append({"prompt": ids, "media": media, "new_tokens": NEW_TOKENS, "arrival": 0})
    return wanted


class MediaJudge:
    """The plain model in float32, its own tower and processor; answers are judged as `judge.Judge` does."""

    def __init__(self, directory: Path) -> None:
        self.device = "cuda" if ON_GPU else "cpu"
        self.model, self.encoder = parts(KimiK2.from_pretrained(directory, backend=self.device, dtype="float32"))
        self.pads = self.encoder.config.media_token_ids

    def logprobs(self, asked: dict[str, Any], answer: dict[str, Any]) -> torch.Tensor:
        """[tokens, vocab_size] after what the answer says before each token."""
        import media_code
        from PIL import Image

        code = media_code.MediaCode(LIMITS)
        media = []
        for files in asked["media"]:
            frames = [Image.open(path) for path in files]
            image, video = {"type": "image", "image": frames[0]}, {"type": "video_chunk", "video_chunk": frames}
            media.append(code._media(video if len(frames) > 1 else image))
        ids = answer["prompt"] + answer["tokens"][:-1]
        counts = [len(list(run)) for token, run in itertools.groupby(answer["prompt"]) if token in self.pads]
        assert counts == [one.grid.tokens() for one in media]
        part = None
        if media:
            rows = self.encoder.rows([answer["prompt"]], [media])
            assert rows is not None
            part = rows.padded(len(ids)).to(self.device), rows.features
        logits = self.model(torch.tensor([ids], device=self.device), media=part)
        said: torch.Tensor = logits[0, len(answer["prompt"]) - 1 :].float().log_softmax(-1).cpu()
        return said


def test_as_far_from_float32_as_rounding(tmp_path: Path) -> None:
    """All in one batch; the judge sees an answer to another image."""
    checkpoint = tmp_path / "model"
    write_checkpoint(checkpoint)
    judge = MediaJudge(checkpoint)
    vocab = config().vocab_size
    asked = prompts(draw(tmp_path), special_tokens(vocab - 256)["<|media_pad|>"])
    served, log = serve(checkpoint, "bfloat16", asked, tmp_path, **OPTIONS, **(GPU_OPTIONS if ON_GPU else {}))
    assert "kimi-k2: operations are ours" in log
    answers = [{"prompt": one, "tokens": two} for one, two in zip(served["prompts"], served["tokens"], strict=True)]
    gaps, errors = [], []
    for one, answer, said in zip(asked, answers, served["logprobs"], strict=True):
        logprobs = judge.logprobs(one, answer)
        chosen = logprobs.gather(-1, torch.tensor(answer["tokens"])[:, None])[:, 0]
        gaps.append(logprobs.amax(-1) - chosen)
        errors.append((torch.tensor(said) - chosen).abs())
    every, error = torch.cat(gaps), torch.cat(errors)
    print(f"best {int((every == 0).sum())} of {len(every)}, error of log-probabilities mean {error.mean():.4f}, 99 % "
          f"{error.quantile(0.99):.3f}, largest {error.max():.3f}")  # fmt: skip
    assert max(float(gap.mean()) for gap in gaps) < ROUNDING
    assert float(error.mean()) < 0.06
    other = judge.logprobs({**asked[1], "media": [[str(tmp_path / "changed.png")]]}, changed(tmp_path, answers[1]))
    found = other.amax(-1) - other.gather(-1, torch.tensor(answers[1]["tokens"])[:, None])[:, 0]
    assert float(found.mean()) > 2 * float(gaps[1].mean()) + 0.01


def changed(directory: Path, answer: dict[str, Any]) -> dict[str, Any]:
    """The same answer, as if to another image of the same size."""
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(99).integers(0, 256, (60, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(directory / "changed.png")
    return answer
