"""A logits processor of vLLM's that has a request answer with given tokens.

Two engines then say the log-probabilities of the same tokens, and their errors can be compared one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sampling import FORCED
from torch import Tensor
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor


class Forced(AdapterLogitsProcessor):  # type: ignore[misc]
    """Leaves the n-th of the tokens that `sampling.forced` names as the only one for the n-th place."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Callable[[list[int], Tensor], Tensor] | None:
        tokens = (params.extra_args or {}).get(FORCED)
        if tokens is None:
            return None

        def only(made: list[int], logits: Tensor) -> Tensor:
            token = tokens[min(len(made), len(tokens) - 1)]  # a step may be ahead of the last token
            kept = logits[token].clone()
            logits.fill_(float("-inf"))
            logits[token] = kept
            return logits

        return only
