"""Logits held to NxDI's own rule (its logit_validation): a tolerance for the highest k, and one for a diverging choice.

For each step and each k, the values at the k highest expected logits must agree to atol + rtol * |expected|. Where the
highest logit is another token's, what the run has for its own choice may exceed what it has for the expected one by
less than the divergence tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.parity.trace import ParityError

# NxDI's defaults: k (None for all) to (atol, rtol), and the tolerated difference of a diverging choice.
TOLERANCE_MAP: dict[int | None, tuple[float, float]] = {
    5: (1e-5, 0.01), 50: (1e-5, 0.02), 1000: (1e-5, 0.03), None: (1e-5, 0.05)
}  # fmt: skip
DIVERGENCE_TOLERANCE = 0.001


@dataclass(frozen=True)
class LogitCheck:
    """Outcome over all steps.

    Attributes:
        max_difference: largest absolute difference of any logit.
        excess: by k, the largest ratio of a difference to what is tolerated; above 1 is a failure.
        divergences: steps at which another token has the highest logit.
        divergence_difference: largest difference at one of them.
    """

    max_difference: float
    excess: dict[str, float]
    divergences: list[int]
    divergence_difference: float

    @property
    def passed(self) -> bool:
        """Whether all steps are within the tolerances."""
        return max(self.excess.values()) <= 1 and self.divergence_difference < DIVERGENCE_TOLERANCE


def check_logits(actual: Tensor, expected: Tensor) -> LogitCheck:
    """Compare [steps, vocab_size] logits.

    Raises:
        ParityError: numbers of steps or vocabularies differ, or there is a NaN or an infinity.
    """
    if actual.shape != expected.shape:
        raise ParityError(f"logits: expected {list(expected.shape)} (steps, vocabulary), got {list(actual.shape)}")
    for name, logits in (("golden", expected), ("run", actual)):
        finite = logits.isfinite()
        if not bool(finite.all()):
            # Of two infinities the difference is NaN, which a maximum may hide.
            kind = "NaN" if bool(logits.isnan().any()) else "infinity"
            raise ParityError(f"logits of the {name}: {kind} at step {int((~finite).any(-1).nonzero()[0])}")
    actual, expected = actual.double(), expected.double()
    difference = (actual - expected).abs()
    excess = {}
    for k, (atol, rtol) in TOLERANCE_MAP.items():
        highest = expected.topk(min(k or expected.shape[1], expected.shape[1])).indices
        allowed = atol + rtol * expected.gather(1, highest).abs()
        excess[str(k or "all")] = float((difference.gather(1, highest) / allowed).max())
    choice, wanted = actual.argmax(-1), expected.argmax(-1)
    steps = (choice != wanted).nonzero().flatten()
    gap = actual.gather(1, choice[:, None]) - actual.gather(1, wanted[:, None])
    worst = float(gap[steps].max()) if len(steps) else 0.0
    return LogitCheck(float(difference.max()), excess, steps.tolist(), worst)


def random_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    """Token ids to run without a tokenizer, the same for the same seed."""
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
