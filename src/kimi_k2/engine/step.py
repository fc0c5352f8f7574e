"""What a step of a generation gives its caller."""

from __future__ import annotations

from dataclasses import dataclass

from kimi_k2.engine.sampler import TokenLogprobs


@dataclass(frozen=True)
class Step:
    """What one step produced: a token for each sequence, None for those that have ended, and its seconds.

    With `SamplingParams.logprobs` also log-probabilities, of each sequence. With drafts a verification gives some
    sequences several tokens: it is as many steps, of which the first has the seconds, and a sequence that got fewer
    has None in the last.
    """

    tokens: tuple[int | None, ...]
    seconds: float
    logprobs: tuple[TokenLogprobs, ...] = ()
