"""Drafts on a Hopper GPU: verified from graphs, greedily token for token what is generated without."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch

from kimi_k2.bench.kernels.drafts import synthetic_head
from kimi_k2.bench.kernels.model import synthetic_rank
from kimi_k2.config import KimiK2Config
from kimi_k2.engine import drafters, speculate
from kimi_k2.engine.cache import PagedCache
from kimi_k2.engine.draft_length import DraftLength
from kimi_k2.engine.drafters import Accepted, Choose, Drafter, HeadDrafter, NgramDrafter
from kimi_k2.engine.generate import Generator
from kimi_k2.engine.graphs import GraphRecorder
from kimi_k2.engine.rejection import Proposal
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.engine.step import Step
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops import registry
from kimi_k2.sharding.layout import Layout

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.filterwarnings("ignore::kimi_k2.errors.KimiK2Warning"),
]
PROMPTS = [[5, 6, 7, 8] * 20, list(range(300, 317)), [9]]


@pytest.fixture(autouse=True)
def _mode() -> Iterator[None]:
    registry.set_batch_invariant(True)
    yield
    registry.set_batch_invariant(False)


@pytest.fixture(scope="module", params=["kimi-k2-instruct-0905", "kimi-k2-thinking"])
def model(request: pytest.FixtureRequest) -> KimiK2ForCausalLM:
    config = KimiK2Config.load(request.param).model_copy(update={"num_hidden_layers": 4})
    return synthetic_rank(config, Layout(8, target="cuda", experts="stored"), 0, communicate=False)


class Half(NgramDrafter):
    """Knows the replies; every third of its tokens is wrong."""

    def __init__(self, replies: list[list[int]]) -> None:
        super().__init__()
        self.replies = replies

    def start(self, cache: PagedCache, prompts: Sequence[Sequence[int]]) -> None:
        self.said = [0] * len(prompts)

    def propose(self, last: Accepted, wanted: Sequence[int], choose: Choose) -> Proposal:
        rows = []
        for row, own in enumerate(last.tokens):
            self.said[row] += len(own)
            ahead = self.replies[row][self.said[row] :][: max(wanted)]
            rows.append([one + (self.said[row] + place) % 3 // 2 for place, one in enumerate(ahead)])
        made = torch.tensor([row + [0] * (max(wanted) - len(row)) for row in rows], dtype=torch.int64, device="cuda")
        return Proposal(made, tuple(wanted))


def said(steps: list[Step], row: int) -> list[tuple[int | None, object]]:
    return [(step.tokens[row], step.logprobs[row]) for step in steps if step.tokens[row] is not None]


@pytest.mark.parametrize("kind", ["half", "ngram", "llama", "mla"])
def test_greedy_is_bit_for_bit_that_without(
    model: KimiK2ForCausalLM, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and log-probabilities, in batch-invariant mode, over graphs of several widths and a second generation.

    The first has steps without drafts.
    """
    monkeypatch.setattr(drafters, "MAX_GRAPHS", 3 if kind == "mla" else 8)  # some are given up and captured anew
    params = SamplingParams(max_new_tokens=24, logprobs=2, ignore_eos=True)
    plain = Generator(model)
    wanted = list(plain.stream(PROMPTS, params))
    plain.close()
    replies = [[token for token, _ in said(wanted, row) if token is not None] for row in range(len(PROMPTS))]
    drafter: Drafter
    if kind in ("llama", "mla"):
        drafter = HeadDrafter(synthetic_head(model, kind), GraphRecorder)  # type: ignore[arg-type]
    else:
        drafter = NgramDrafter() if kind == "ngram" else Half([reply + [0] * 8 for reply in replies])
    generator = Generator(model, drafter=drafter, draft_tokens=3, adaptive=False)
    for off in (True, False):
        with monkeypatch.context() as patch:
            if off:
                patch.setattr(DraftLength, "choose", partial(next, itertools.cycle((3, 0, 0, 1, 0, 0, 0, 0, 0, 2))))
                patch.setattr(speculate, "PAUSE", 3)
            found = list(generator.stream(PROMPTS, params))
        for row in range(len(PROMPTS)):
            assert said(found, row) == said(wanted, row)
        assert kind != "half" or off or generator.stats.tokens_per_step > 1.5
    generator.close()
