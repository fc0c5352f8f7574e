"""Batch-invariant mode on a CPU: a sequence has the same bits alone, in any batch, in any chunks and in pages."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.generate import Generator, prefill
from kimi_k2.engine.prompt_step import PromptStep
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.errors import KernelError
from kimi_k2.model.cache import LatentCache, pages_of
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops import registry
from kimi_k2.ops.linear import dense_linear

# (checkpoint, compute dtype, dtype of the KV cache, weights as stored)
CASES = [
    ("fp8", torch.float32, torch.float32, True),
    ("fp8", torch.bfloat16, torch.float8_e4m3fn, False),
    ("thinking", torch.float32, torch.float32, True),
]
DRAWN = int(os.environ.get("KIMI_K2_DRAWS", "2"))
STEPS = 1
PARAMS = SamplingParams(max_new_tokens=3, logprobs=2, ignore_eos=True)


def invariant(checkpoint: Path, **options: Any) -> KimiK2ForCausalLM:
    model = KimiK2ForCausalLM.from_pretrained(checkpoint, **options)
    model.batch_invariant = True
    return model


def run(
    model: KimiK2ForCausalLM,
    prompts: list[list[int]],
    following: list[list[int]],
    chunk: int | None,
    spare: int = 0,
    paged: bool = False,
) -> Tensor:
    """Logits [B, 1 + STEPS, vocab_size]: of the prompts' last tokens, then of the tokens that follow."""
    lengths = [len(prompt) + STEPS + spare for prompt in prompts]
    pages = sum(map(pages_of, lengths)) if paged else None
    cache = LatentCache(model.config, len(prompts), max(lengths), pages, dtype=model.kv_cache_dtype or model.dtype)
    cache.assign(lengths)
    decode = DecodeStep(model, cache)
    rows = [prefill(model, prompts, cache, chunk, read=PromptStep(decode))]
    for step in range(STEPS):
        tokens = torch.tensor([tail[step] for tail in following])
        rows.append(decode(tokens, torch.tensor([len(prompt) + step for prompt in prompts])))
    return torch.stack(rows, dim=1)


def drawn(model: KimiK2ForCausalLM, seed: int) -> tuple[list[list[int]], list[list[int]]]:
    rng, most = random.Random(seed), model.config.vocab_size - 1
    lengths = [rng.choice([1, 2, 16, 17, 30, 65]) for _ in range(rng.choice([1, 2, 4]))]
    return [[rng.randint(0, most) for _ in range(length)] for length in lengths], [
        [rng.randint(0, most) for _ in range(STEPS)] for _ in lengths
    ]


@pytest.mark.parametrize(("name", "dtype", "cache", "stored"), CASES)
def test_logits_do_not_depend_on_the_batch(
    checkpoints: dict[str, Path], name: str, dtype: torch.dtype, cache: torch.dtype, stored: bool
) -> None:
    model = invariant(checkpoints[name], dtype=dtype, keep_quantized=stored)
    model.kv_cache_dtype = cache
    prompt, following = drawn(model, 1000)
    alone = run(model, prompt[:1], following[:1], None)
    for seed in range(DRAWN):
        rng = random.Random(seed)
        prompts, others = drawn(model, seed)
        row = rng.randint(0, len(prompts))
        chunk = rng.choice([None, 7, 16, 33])
        batch = run(
            model,
            [*prompts[:row], prompt[0], *prompts[row:]],
            [*others[:row], following[0], *others[row:]],
            chunk,
            rng.choice([0, 5]),
            paged=bool(seed % 2),
        )
        assert torch.equal(batch[row], alone[0]), (seed, len(prompts), row, chunk)


def test_the_normal_mode_does_depend_on_it(checkpoints: dict[str, Path]) -> None:
    """The test above could fail: without the mode a GEMM's rounding follows the number of its rows."""
    model = KimiK2ForCausalLM.from_pretrained(checkpoints["fp8"], dtype=torch.float32)
    prompts, following = drawn(model, 4)
    prompts, following = prompts * 3, following * 3
    alone = torch.cat([run(model, [p], [f], None) for p, f in zip(prompts, following, strict=True)])
    assert not torch.equal(run(model, prompts, following, 7), alone)


def test_two_models_of_different_modes(checkpoints: dict[str, Path]) -> None:
    """Step by step in turns, and in threads at once, each computes as it does by itself."""
    models = KimiK2ForCausalLM.from_pretrained(checkpoints["fp8"]), invariant(checkpoints["fp8"])
    prompts = [list(range(1, 8)), list(range(20, 37))]
    alone = [list(Generator(model).stream(prompts, PARAMS)) for model in models]
    wanted = [[step.logprobs for step in steps] for steps in alone]
    assert wanted[0] != wanted[1]
    turns = zip(*(Generator(model).stream(prompts, PARAMS) for model in models), strict=True)
    assert [list(steps) for steps in zip(*([s.logprobs for s in turn] for turn in turns), strict=True)] == wanted
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda model: [step.logprobs for step in Generator(model).stream(prompts, PARAMS)], models)
        assert list(found) == wanted
    assert not registry.batch_invariant()


def test_a_gpu_without_such_an_entry_is_refused() -> None:
    class OnGpu(torch.Tensor):
        is_cuda = True

    x = torch.zeros(2, 8).as_subclass(OnGpu)
    refused = r"batch-invariant mode: no entry of dense_linear .*float32 \[2, 8\]"
    with registry.computing(batch_invariant=True), pytest.raises(KernelError, match=refused):
        dense_linear(x, torch.zeros(4, 8))
