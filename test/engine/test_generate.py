"""Sampling against transformers' own logits processors; stopping, seeds, limits and bad requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kimi_k2.engine.generate import generate, prefill, stream
from kimi_k2.engine.sampler import Sampler, SamplingParams
from kimi_k2.errors import GenerationError
from kimi_k2.model.decoder import KimiK2ForCausalLM


@pytest.fixture(scope="module")
def model(checkpoints: dict[str, Path]) -> KimiK2ForCausalLM:
    return KimiK2ForCausalLM.from_pretrained(checkpoints["fp8"])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(0.7, 0, 1.0, 0.0), (1.0, 5, 1.0, 0.0), (1.0, 0, 0.8, 0.0), (1.3, 40, 0.5, 0.0), (0.9, 0, 0.9, 0.05)],
)
def test_probabilities_are_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(16, 500, generator=torch.Generator().manual_seed(1)) * 3
    expected = processors.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = processors.TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = processors.TopPLogitsWarper(top_p)(None, expected)
    if min_p:
        expected = processors.MinPLogitsWarper(min_p)(None, expected)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    sampler = Sampler(params, [[0]] * 16)
    ours = sampler.probabilities(logits)
    torch.testing.assert_close(ours / ours.sum(-1, keepdim=True), expected.softmax(-1), rtol=1e-4, atol=1e-7)


def test_repetition_penalty_is_transformers() -> None:
    """Of the prompt's tokens and the reply's; each step of the reply is greedy."""
    processors = pytest.importorskip("transformers.generation.logits_process")
    draw = torch.Generator().manual_seed(2)
    prompts = torch.randint(0, 12, (3, 4), generator=draw)
    sampler, sequences = Sampler(SamplingParams(repetition_penalty=1.7), prompts.tolist()), prompts
    for _ in range(12):
        logits = torch.randn(3, 12, generator=draw)
        expected = processors.RepetitionPenaltyLogitsProcessor(1.7)(sequences, logits.clone()).argmax(-1)
        assert sampler(logits).tolist() == expected.tolist()
        sequences = torch.cat([sequences, expected[:, None]], 1)


def test_presence_and_frequency_count_the_reply_alone() -> None:
    logits = torch.tensor([[1.0, 0.75, 0.0]])
    frequent = Sampler(SamplingParams(frequency_penalty=0.15), [[0, 0, 0]])
    assert [int(frequent(logits)) for _ in range(5)] == [0, 0, 1, 0, 1]  # 1, 0.85, 0.70; 0.75; 0.70; 0.60
    present = Sampler(SamplingParams(presence_penalty=0.3), [[0]])
    assert [int(present(logits)) for _ in range(4)] == [0, 1, 0, 0]  # 1; 0.7 < 0.75; 0.7 > 0.45


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(5))
    sampler = Sampler(SamplingParams(temperature=0.5, top_k=3, presence_penalty=1.0, logprobs=2), [[1], [2]])
    tokens, expected = sampler(logits), logits.log_softmax(-1)
    for row, found in enumerate(sampler.logprobs):
        assert found.chosen == pytest.approx(float(expected[row, tokens[row]]))
        assert [token for token, _ in found.top] == expected[row].topk(2).indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(expected[row].topk(2).values.tolist())


def test_sampled_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -50.0]])
    sampler = Sampler(SamplingParams(temperature=1.0, seed=3), [[0]])
    counts = torch.bincount(torch.cat([sampler(logits) for _ in range(4000)]), minlength=4) / 4000
    # Four standard deviations of a proportion of 4000 draws.
    assert (counts - logits[0].softmax(-1)).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_each_sequence_of_a_batch_draws_by_its_own_seed(model: KimiK2ForCausalLM) -> None:
    """The same prompt twice gives two replies; the second is the first's with the next seed."""
    first, next_seed = (SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed) for seed in (7, 8))
    batch = generate(model, [[1, 2, 3], [1, 2, 3]], first).token_ids
    assert batch[0] != batch[1]
    assert batch[1] == generate(model, [[1, 2, 3]], next_seed).token_ids[0]


def test_a_sequence_samples_alike_alone_and_in_a_batch(model: KimiK2ForCausalLM) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=1.0, top_p=0.95, seed=7)
    alone = generate(model, [[1, 2, 3]], params).token_ids[0]
    batch = generate(model, [[1, 2, 3], [9, 8, 7, 6, 5, 4]], params).token_ids[0]
    assert alone == batch
    other = generate(model, [[1, 2, 3]], SamplingParams(max_new_tokens=12, temperature=1.0, seed=8)).token_ids[0]
    assert other != alone


def test_top_k_1_is_greedy(model: KimiK2ForCausalLM) -> None:
    greedy = generate(model, [[5, 6]], SamplingParams(max_new_tokens=8))
    sampled = generate(model, [[5, 6]], SamplingParams(max_new_tokens=8, temperature=2.0, top_k=1, seed=1))
    assert greedy.token_ids == sampled.token_ids


def test_eos_ends_a_sequence_and_leaves_the_others_running(model: KimiK2ForCausalLM) -> None:
    prompts = [[1, 2, 3], [40, 50]]
    free = generate(model, prompts, SamplingParams(max_new_tokens=10, ignore_eos=True))
    assert free.finish_reasons == ["length", "length"]
    stop = free.token_ids[0][3]
    at = [tokens.index(stop) if stop in tokens else None for tokens in free.token_ids]
    ended = generate(model, prompts, SamplingParams(max_new_tokens=10, eos_token_ids=frozenset({stop})))
    for row, place in enumerate(at):
        expected = free.token_ids[row] if place is None else free.token_ids[row][: place + 1]
        assert ended.token_ids[row] == expected
        assert ended.finish_reasons[row] == ("length" if place is None else "stop")
    assert len(ended.itl) == max(len(tokens) for tokens in ended.token_ids) - 1


def test_tpot_leaves_the_first_token_out(model: KimiK2ForCausalLM) -> None:
    out = generate(model, [[1]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert len(out.itl) == 3
    assert out.tpot == pytest.approx(sum(out.itl) / 3)
    single = generate(model, [[1]], SamplingParams(max_new_tokens=1))
    assert single.itl == []
    assert single.tpot != single.tpot  # NaN


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"),
    ],
)
def test_bad_sampling_parameters(arguments: dict[str, float], field: str) -> None:
    with pytest.raises(GenerationError, match=f"^{field}: expected"):
        SamplingParams(**arguments)  # type: ignore[arg-type]


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
        (lambda m: m(torch.tensor([[1, 2]]), torch.tensor([[4, 5]])), "need a cache"),
    ],
)
def test_bad_requests(model: KimiK2ForCausalLM, call: Callable[[KimiK2ForCausalLM], object], says: str) -> None:
    with pytest.raises(GenerationError, match=says):
        call(model)


def test_streamed_steps_are_the_generated_tokens(model: KimiK2ForCausalLM) -> None:
    params = SamplingParams(max_new_tokens=5, ignore_eos=True)
    steps = list(stream(model, [[3, 4, 5]], params))
    assert [step.tokens[0] for step in steps] == generate(model, [[3, 4, 5]], params).token_ids[0]
