"""vLLM 0.11 with vllm-neuron 0.2 over NeuronKimiK2ForCausalLM in CPU mode: right tokens, whenever requests come."""

from __future__ import annotations

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import pytest
from harness import launch
from reference import greedy, reference

ABSENT = [name for name in ("vllm", "vllm_neuron") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(ABSENT), reason=f"needs vllm 0.11 and vllm-neuron 0.2 (docs/trainium.md): not importable: {', '.join(ABSENT)}"
)

MAX_MODEL_LEN = 64
MAX_NUM_SEQS = 3
SHORT = {"context_encoding_buckets": [16], "prefix_buckets": [16, 48], "max_context_length": 16}
CACHED = {**SHORT, "context_encoding_buckets": [16, 48], "max_context_length": 48}
BLOCKS = {"enable_prefix_caching": True, "block_size": 8, "num_gpu_blocks_override": 40}
# Checkpoint, override_neuron_config beside on_cpu, further arguments of vLLM, and the quantization that must result.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str | None]] = {
    "K2, FP8 blocks kept": ("fp8", {}, {}, "blockwise_symmetric"),
    "K2-Thinking, INT4 to FP8 a channel": ("thinking", {}, {}, "expert_wise_per_channel_symmetric"),
    "K2.5, INT4 dequantized": ("k2.5", {"experts": "bf16"}, {}, None),
    "prompts longer than a prefill": ("bf16", {**SHORT, "token_generation_buckets": [64]}, BLOCKS, None),
    "cached prefixes": ("bf16", {**CACHED, "token_generation_buckets": [64]}, BLOCKS, None),
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


def requested(job: dict[str, Any]) -> dict[str, Any]:
    """A job: tokens of each request, and what the engine was made of.

    Nothing of vLLM or vllm-neuron is replaced: its platform, scheduler, worker, runner and loader run as installed, and
    find the model through the entry points of `kimi_k2.neuron.vllm`.
    """
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="WARNING")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"):
        os.environ.pop(name)
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(job["directory"], **job["arguments"], additional_config={"override_neuron_config": job["override"]})
    engine: Any = llm.llm_engine
    waiting, step, most = list(enumerate(job["requests"])), 0, 0
    tokens: dict[str, list[int]] = {}
    cached: dict[str, int] = {}
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1]["arrival"] <= step:
            number, request = waiting.pop(0)
            sampling = SamplingParams(
                temperature=0.0, max_tokens=request["new_tokens"], ignore_eos=True, detokenize=False
            )
            engine.add_request(str(number), {"prompt_token_ids": request["prompt"]}, sampling)
        most = max(most, engine.get_num_unfinished_requests())
        for output in engine.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
                cached[output.request_id] = output.num_cached_tokens
        step += 1
    runner = engine.model_executor.driver_worker.worker.model_runner
    neuron = runner.model.neuron_config
    return {
        "tokens": [tokens[str(number)] for number in range(len(job["requests"]))],
        "cached": [cached[str(number)] for number in range(len(job["requests"]))],
        "most_at_once": most,
        "platform": type(current_platform).__name__,
        "runner": type(runner).__module__,
        "model": type(runner.model.model).__name__,
        "quantization": neuron.quantization_type if neuron.quantized else None,
    }


def serve(
    directory: Path, override: dict[str, Any], job: list[dict[str, Any]], tmp_path: Path, **more: Any
) -> dict[str, Any]:
    """What `requested` answers for a directory of links: the plugin puts its artifacts beside config.json.

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
    answer: dict[str, Any] = launch(requested, {**given, "requests": job})
    return answer


@pytest.mark.parametrize("case", CASES)
def test_eight_requests_at_random_times(checkpoints: dict[str, Path], tmp_path: Path, case: str) -> None:
    """vLLM's own block tables and hashes too; prompts longer than a prefill graph go through it in parts."""
    name, override, arguments, quantization = CASES[case]
    job = requests(seed=len(case))
    for number, request in enumerate(job if case == "cached prefixes" else ()):
        request["prompt"] = (job[number % 2]["prompt"][:16] + request["prompt"])[:44]
    answer = serve(checkpoints[name], override, job, tmp_path, **arguments)
    assert answer["platform"] == "NeuronPlatform"
    assert answer["runner"] == "vllm_neuron.worker.neuronx_distributed_model_runner"
    assert answer["model"] == "ServedKimiK2ForCausalLM"
    assert answer["quantization"] == quantization
    assert answer["most_at_once"] >= MAX_NUM_SEQS  # else nothing was batched
    if case == "cached prefixes":
        assert sum(count >= 8 for count in answer["cached"]) >= 4, answer["cached"]
    # What is requantized must be so in the reference too, to choose the same tokens.
    model = reference(checkpoints[name], (1, 0) if str(quantization).startswith("expert") else None)
    assert answer["tokens"] == [greedy(model, request["prompt"], request["new_tokens"])[0] for request in job]
