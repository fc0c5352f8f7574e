"""Run in a process of its own: serve prompts with images and video chunks by vLLM's K2.5 class; JSON in, JSON out.

Usage: vllm_images.py MODEL REQUESTS.json RESULT.json; REQUESTS has `dtype`, `new_tokens` and `requests`, each with a
`prompt` (token ids, one media token an image or chunk) and `media` (lists of files: an image, or a chunk's frames), and
maybe `options`, which are LLM's. With `logprobs` the result has the chosen tokens' too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main(model: str, job_file: str, result_file: str) -> None:
    from PIL import Image
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    limits = {
        "max_model_len": 512,
        "max_num_seqs": 5,
        "limit_mm_per_prompt": {"vision_chunk": 3},
        "enforce_eager": True,
    }
    llm = LLM(model=model, dtype=job["dtype"], **{**limits, **job.get("options", {})})
    prompts = []
    for one in job["requests"]:
        prompt = {"prompt_token_ids": one["prompt"]}
        chunks: list[dict[str, object]] = []
        for files in one["media"]:
            frames = [Image.open(path) for path in files]
            image: dict[str, object] = {"type": "image", "image": frames[0], "uuid": None}
            # What a chunk says of its video goes into prompts of text alone; ids have it already.
            video: dict[str, object] = {
                "type": "video_chunk", "video_chunk": frames, "uuid": None, "prompt": "", "video_idx": 0,
            }  # fmt: skip
            chunks.append(video if len(frames) > 1 else image)
        if chunks:
            prompt["multi_modal_data"] = {"vision_chunk": chunks}
        prompts.append(prompt)
    said = 0 if job.get("logprobs") else None
    sampling = SamplingParams(
        temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False, logprobs=said
    )
    found: list[dict[str, object]] = []
    for one in llm.generate(prompts, sampling):
        tokens = list(one.outputs[0].token_ids)
        found.append({"prompt": list(one.prompt_token_ids or ()), "tokens": tokens})
        if said is not None:
            steps = zip(one.outputs[0].logprobs or (), tokens, strict=True)
            found[-1]["logprobs"] = [at[token].logprob for at, token in steps]
    Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
