"""Seeds, stopping, log-probabilities and bad requests; `test_defaults.py` has sampling as transformers does it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers.generation import TopPLogitsWarper

from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep
from kimi_k2.engine.generate import generate, prefill
from kimi_k2.engine.prompt_step import PromptStep
from kimi_k2.engine.sampler import Sampler, SamplingParams
from kimi_k2.errors import GenerationError
from kimi_k2.model.decoder import KimiK2ForCausalLM


def test_presence_and_frequency_count_the_reply_alone() -> None:
    logits = torch.tensor([[1.0, 0.75, 0.0]])
    frequent = Sampler(SamplingParams(frequency_penalty=0.15), [[0, 0, 0]])
    assert [int(frequent(logits)) for _ in range(5)] == [0, 0, 1, 0, 1]  # 1, 0.85, 0.70; 0.75; 0.70; 0.60
    present = Sampler(SamplingParams(presence_penalty=0.3), [[0]])
    assert [int(present(logits)) for _ in range(4)] == [0, 1, 0, 0]  # 1; 0.7 < 0.75; 0.7 > 0.45


def test_tokens_of_one_probability_are_cut_where_transformers_cuts_them() -> None:
    logits, top_p = torch.zeros(1, 4), 0.5
    kept = Sampler(SamplingParams(temperature=1.0, top_p=top_p), [[0]]).probabilities(logits) > 0
    assert int(kept.sum()) == int(TopPLogitsWarper(top_p)(torch.zeros(1, 0), logits).isfinite().sum())


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(5))
    sampler = Sampler(SamplingParams(temperature=0.5, top_k=3, presence_penalty=1.0, logprobs=2), [[1], [2]])
    tokens, expected = sampler(logits), logits.log_softmax(-1)
    for row, found in enumerate(sampler.logprobs):
        assert found.chosen == pytest.approx(float(expected[row, tokens[row]]))
        assert [token for token, _ in found.top] == expected[row].topk(2).indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(expected[row].topk(2).values.tolist())


def test_each_sequence_of_a_batch_draws_by_its_own_seed(model: KimiK2ForCausalLM) -> None:
    """The same prompt twice gives two replies, the second that of the next seed, whatever else is in the batch."""
    first, next_seed = (SamplingParams(max_new_tokens=12, temperature=1.0, top_p=0.95, seed=seed) for seed in (7, 8))
    batch = generate(model, [[1, 2, 3], [1, 2, 3], [9, 8, 7, 6, 5, 4]], first)
    assert batch[0] != batch[1]
    assert batch[:2] == [generate(model, [[1, 2, 3]], params)[0] for params in (first, next_seed)]


def test_eos_ends_a_sequence_and_leaves_the_others_running(model: KimiK2ForCausalLM) -> None:
    prompts = [[1, 2, 3], [40, 50]]
    free = generate(model, prompts, SamplingParams(max_new_tokens=10, ignore_eos=True))
    stop = free[0][3]
    ended = generate(model, prompts, SamplingParams(max_new_tokens=10, eos_token_ids=frozenset({stop})))
    assert ended == [row[: row.index(stop) + 1] if stop in row else row for row in free]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: generate(m, [], SamplingParams()), "at least one prompt"),
        (lambda m: generate(m, [[1], []], SamplingParams()), "at least one token"),
        (lambda m: generate(m, [[768]], SamplingParams()), r"token ids must be in 0\.\.767"),
        (lambda m: generate(m, [[-1]], SamplingParams()), "token ids must be in"),
        (lambda m: generate(m, [[1] * 8190], SamplingParams(max_new_tokens=4)), "exceed max_position_embeddings"),
        (lambda m: generate(m, [[1]], SamplingParams(), chunk_size=0), "chunk_size"),
        (lambda m: prefill(m, [[1, 2, 3]], m.new_cache(1, 2)), "outside the cache of 2 slots"),
        (
            lambda m: prefill(m, [[1, 2, 3]], (cache := new_cache(m, 1, 2)), read=PromptStep(DecodeStep(m, cache))),
            "cache of 2",
        ),
        (lambda m: m(torch.tensor([[1, 2]]), torch.tensor([[4, 5]])), "need a cache"),
        *(
            (lambda _, given={name: value}: SamplingParams(**given), f"^{name}: expected")
            for name, value in (
                ("top_k", -1),
                ("logprobs", 21),
                ("seed", -1),
                ("presence_penalty", 2.1),
                ("frequency_penalty", -2.1),
                ("min_tokens", -1),
                ("max_new_tokens", 0),
                ("max_new_tokens", 2.5),
                ("top_k", True),
                ("temperature", "0.6"),
                ("ignore_eos", "no"),
            )
        ),
    ],
)
def test_bad_requests(model: KimiK2ForCausalLM, call: Callable[[KimiK2ForCausalLM], object], says: str) -> None:
    with pytest.raises(GenerationError, match=says):
        call(model)
