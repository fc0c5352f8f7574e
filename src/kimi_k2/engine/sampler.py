"""How the next token is chosen from logits: greedy, or drawn with temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.errors import GenerationError

MIN_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens; names and meanings as in vLLM and Hugging Face.

    Attributes:
        max_new_tokens: tokens to generate at most, a sequence.
        temperature: 0 is greedy; below MIN_TEMPERATURE a quotient of logits could overflow.
        top_p: keep the smallest set of tokens whose probability reaches this.
        top_k: keep this many tokens; 0 keeps all.
        seed: of the random choice; sequence i of a batch uses its own generator, seeded seed + i.
        eos_token_ids: tokens that end a sequence; they are returned as its last token.
        ignore_eos: generate max_new_tokens in any case (for benchmarks).

    Raises:
        GenerationError: a value is out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            (
                "temperature",
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf"),
                f"0 (greedy) or a finite number, at least {MIN_TEMPERATURE}",
            ),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("seed", 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
        ):
            if not valid:
                raise GenerationError(f"{name}: expected {expected}, got {getattr(self, name)!r}")


def check_finite(logits: Tensor) -> None:
    """Refuse logits of which no token can be chosen.

    Raises:
        GenerationError: there are NaN or Inf; how many.
    """
    bad = int((~logits.isfinite()).sum())
    if bad:
        raise GenerationError(
            f"{bad} of {logits.numel()} logits are NaN or Inf: weights or fields of config.json lead out of"
            f" {str(logits.dtype).removeprefix('torch.')}'s range; `kimi-k2 verify` or `parity` show where"
        )


class Sampler:
    """Chooses the next token of each sequence, reproducibly whatever else is in the batch."""

    def __init__(self, params: SamplingParams, batch: int) -> None:
        self.params = params
        self.generators = [torch.Generator().manual_seed(params.seed + i) for i in range(batch)]

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [B, vocab_size] to token ids int64 [B].

        Raises:
            GenerationError: (for logits on a CPU) see `check_finite`.
        """
        if not logits.is_cuda:  # a GPU's would have to be waited for
            check_finite(logits)
        if self.params.temperature == 0:
            return logits.argmax(dim=-1)
        probabilities = self._probabilities(logits.float().cpu())
        rows = zip(probabilities, self.generators, strict=True)
        drawn = [torch.multinomial(row, 1, generator=generator) for row, generator in rows]
        return torch.cat(drawn).to(logits.device)

    def _probabilities(self, logits: Tensor) -> Tensor:
        logits = logits / self.params.temperature
        if self.params.top_k and self.params.top_k < logits.shape[-1]:
            threshold = logits.topk(self.params.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        probabilities = logits.softmax(dim=-1)
        if self.params.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A token stays if the mass before it is still below top_p, so the first one always stays.
            ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= self.params.top_p, 0)
            probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
        return probabilities
