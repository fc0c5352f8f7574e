"""Generation with drafts beside generation without, of the same prompts in the same process."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from kimi_k2.engine.generate import Generator
from kimi_k2.engine.sampler import SamplingParams

# Text that is new, and text that a reply repeats parts of.
PROMPTS = [
    "Why is the sky blue?",
    "Add type hints: def area(width, height): return width * height",
]


def seconds_a_token(generator: Generator, prompts: Sequence[Sequence[int]], params: SamplingParams) -> float:
    """Seconds behind the first token, over the tokens of a sequence behind it, of one generation."""
    made, spent = 0, 0.0
    for number, step in enumerate(generator.stream(prompts, params)):
        if number:
            spent += step.seconds
            made += sum(token is not None for token in step.tokens)
    return spent * len(prompts) / max(made, 1)


def compare(generator: Generator, prompts: Sequence[Sequence[int]], params: SamplingParams, runs: int) -> Iterator[str]:
    """Lines of a report; both kinds take turns, after an untimed reply each.

    Args:
        generator: with a drafter.
        prompts: token ids of the batch.
        params: of the replies.
        runs: timed replies of each kind.
    """
    plain = Generator(generator.model, reduce=generator.reduce, gather=generator.gather)
    times: dict[Generator, list[float]] = {plain: [], generator: []}
    for run in range(runs + 1):
        for one, samples in times.items():
            taken = seconds_a_token(one, prompts, params)
            if run:
                samples.append(taken)
    without, drafted = (statistics.median(samples) for samples in times.values())
    yield f"without drafts: {without * 1e3:.2f} ms a token of a sequence, batch {len(prompts)}"
    yield f"with drafts: {drafted * 1e3:.2f} ms, {generator.stats}"
    yield f"{without / drafted:.2f} times as fast"
