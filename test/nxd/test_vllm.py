"""vLLM 0.11 with vllm-neuron 0.2 over NeuronKimiK2ForCausalLM in CPU mode: right tokens, whenever requests come."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import plain_model
from test_experts import requantized

from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.sharding.experts.per_channel import ChannelExperts

WORKER = Path(__file__).with_name("vllm_worker.py")
ABSENT = [name for name in ("vllm", "vllm_neuron") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(ABSENT), reason=f"needs vllm 0.11 and vllm-neuron 0.2 (docs/trainium.md): not importable: {', '.join(ABSENT)}"
)

MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 3
# Checkpoint, override_neuron_config beside on_cpu, and the quantization that must result.
CASES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "K2, FP8 blocks kept": ("fp8", {}, "blockwise_symmetric"),
    "K2-Thinking, INT4 to FP8 a channel": ("thinking", {}, "expert_wise_per_channel_symmetric"),
    "K2.5, INT4 dequantized": ("k2.5", {"experts": "bf16"}, None),
}


def requests(seed: int, count: int = 8) -> list[dict[str, Any]]:
    """Prompts of 3 to 40 tokens, 4 to 16 new ones, arriving 0 to 6 engine steps apart."""
    draw = random.Random(seed)
    arrival, made = 0, []
    for _ in range(count):
        prompt = [draw.randrange(512) for _ in range(draw.randint(3, 40))]
        made.append({"prompt": prompt, "new_tokens": draw.randint(4, 16), "arrival": arrival})
        arrival += draw.randint(0, 6)
    return made


@torch.inference_mode()
def expected(model: Any, job: list[dict[str, Any]]) -> list[list[int]]:
    """Greedy tokens of the plain model, each request alone."""
    return [
        generate(model, [one["prompt"]], SamplingParams(one["new_tokens"], ignore_eos=True)).token_ids[0] for one in job
    ]


def serve(
    directory: Path, override: dict[str, Any], job: list[dict[str, Any]], tmp_path: Path, **more: Any
) -> dict[str, Any]:
    """What vllm_worker.py answers for a directory of links: the plugin puts its artifacts beside config.json.

    `more` are further arguments of vLLM.
    """
    model = tmp_path / "model"
    model.mkdir()
    for path in directory.iterdir():
        (model / path.name).symlink_to(path)
    arguments = {
        "tensor_parallel_size": 1, "max_num_seqs": MAX_NUM_SEQS, "max_model_len": MAX_MODEL_LEN, "dtype": "float32",
        "enable_prefix_caching": False, "skip_tokenizer_init": True, **more,
    }  # fmt: skip
    given = {"directory": str(model), "arguments": arguments, "override": {"on_cpu": True, **override}}
    path, output = tmp_path / "job.json", tmp_path / "output.json"
    path.write_text(json.dumps({**given, "requests": job, "output": str(output)}))
    env = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "MASTER_PORT")}
    env["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        [sys.executable, str(WORKER), str(path)], env=env, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(output.read_text())
    return answer


@pytest.mark.parametrize("case", CASES)
def test_eight_requests_at_random_times(checkpoints: dict[str, Path], tmp_path: Path, case: str) -> None:
    name, override, quantization = CASES[case]
    job = requests(seed=len(case))
    answer = serve(checkpoints[name], override, job, tmp_path)
    assert answer["platform"] == "NeuronPlatform"
    assert answer["runner"] == "vllm_neuron.worker.neuronx_distributed_model_runner"
    assert answer["model"] == "ServedKimiK2ForCausalLM"
    assert answer["quantization"] == quantization
    assert answer["most_at_once"] >= MAX_NUM_SEQS  # else nothing was batched
    if quantization == "expert_wise_per_channel_symmetric":
        # Requantized: the plain model must hold the same values to choose the same tokens.
        model = requantized(checkpoints[name], ChannelExperts())
    else:
        model = plain_model(checkpoints[name])
    assert answer["tokens"] == expected(model, job)


def test_cached_prefixes(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """vLLM's own block tables and hashes: prompts that begin like earlier ones are prefilled behind their blocks."""
    job = requests(seed=5)
    for number, one in enumerate(job):
        one["prompt"] = (job[number % 2]["prompt"][:16] + one["prompt"])[:44]
    override = {"context_encoding_buckets": [16, 48], "prefix_buckets": [16, 48], "token_generation_buckets": [64]}
    blocks = {"enable_prefix_caching": True, "block_size": 8, "num_gpu_blocks_override": 40}
    answer = serve(checkpoints["bf16"], {**override, "max_context_length": 48}, job, tmp_path, **blocks)
    assert sum(count >= 8 for count in answer["cached"]) >= 4, answer["cached"]
    assert answer["tokens"] == expected(plain_model(checkpoints["bf16"]), job)


def test_prompts_longer_than_a_prefill(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """vLLM hands over whole prompts; they go through a prefill graph of 16 tokens in parts."""
    job = requests(seed=6)
    override = {"context_encoding_buckets": [16], "prefix_buckets": [16, 48], "token_generation_buckets": [64]}
    blocks = {"enable_prefix_caching": True, "block_size": 8, "num_gpu_blocks_override": 40}
    answer = serve(checkpoints["bf16"], {**override, "max_context_length": 16}, job, tmp_path, **blocks)
    assert sum(len(one["prompt"]) > 16 for one in job) >= 4
    assert answer["tokens"] == expected(plain_model(checkpoints["bf16"]), job)
