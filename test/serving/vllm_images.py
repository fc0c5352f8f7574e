"""Run in a process of its own: serve prompts with images and video chunks by vLLM's K2.5 class; JSON in, JSON out.

Usage: vllm_images.py MODEL REQUESTS.json RESULT.json; REQUESTS has `dtype`, `new_tokens` and `requests`, each with a
`prompt` (token ids, one media token an image or chunk) and `media` (lists of files: an image, or a chunk's frames), and
maybe `options`, which are LLM's. With `logprobs` the result has the chosen tokens' too. With drafts its last entry
counts them, the accepted ones, and the steps that ours prepared.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main(model: str, job_file: str, result_file: str) -> None:
    job = json.loads(Path(job_file).read_text())
    drafts = "speculative_config" in job.get("options", {})
    if drafts:
        from vllm_requests import count_verified  # keeps vLLM in this process

        # vLLM, in one process, wants a dict of it when it looks for kernels.
        importlib.import_module("llvmlite.binding.ffi").lib._fntab["__dict__"] = {}
        torch.cpu._is_amx_tile_supported = lambda: True  # vLLM then takes pages of any size for MLA
    from PIL import Image
    from vllm import LLM, SamplingParams

    limits = {
        "max_model_len": 512,
        "max_num_seqs": 5,
        "limit_mm_per_prompt": {"vision_chunk": 3},
        "enforce_eager": True,
    }
    llm = LLM(model=model, dtype=job["dtype"], **{**limits, **job.get("options", {})})
    verified = count_verified(llm.llm_engine) if drafts else {}
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
    if drafts:
        counts = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
        took = {name: counts[f"vllm:spec_decode_num_{name}_tokens"] for name in ("draft", "accepted")}
        found.append(took | verified)
    Path(result_file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:4])
