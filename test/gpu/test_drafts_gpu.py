"""Drafts on a Hopper GPU: verified from graphs, greedily token for token what is generated without."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from on_hopper import NEEDS_HOPPER
from torch import nn

from kimi_k2.bench.kernels.model import synthetic_rank
from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import DraftConfig, Form
from kimi_k2.drafts.head import Eagle3Head
from kimi_k2.engine import drafters, speculate
from kimi_k2.engine.draft_length import DraftLength
from kimi_k2.engine.drafters import Accepted, Choose, Drafter, HeadDrafter, NgramDrafter
from kimi_k2.engine.generate import Generator
from kimi_k2.engine.graphs import GraphRecorder
from kimi_k2.engine.sampler import Proposal, SamplingParams, Step
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.linear import Linear
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.draft import PUBLISHED_VOCABULARY, draft_fields

pytestmark = [
    *NEEDS_HOPPER,
    pytest.mark.memory(9.5),
    pytest.mark.filterwarnings("ignore::kimi_k2.errors.KimiK2Warning"),
]
PROMPTS = [[5, 6, 7, 8] * 20, list(range(300, 317)), [9]]
DRAWN = int(os.environ.get("KIMI_K2_DRAWS", "0"))  # more of them, of drawn lengths
PARAMS = SamplingParams(max_new_tokens=24, logprobs=2, ignore_eos=True)


def synthetic_head(target: KimiK2ForCausalLM, form: Form) -> Eagle3Head:
    """A head of the published sizes with random weights on the target's device."""
    config, device = target.config, target.lm_head.weight.device
    vocabulary = min(PUBLISHED_VOCABULARY, len(target.lm_head.weight))
    own_config = DraftConfig.from_dict(draft_fields(config, form, draft_vocab_size=vocabulary))
    with torch.device("meta"):
        head = Eagle3Head(own_config, target, target.dtype)
        plain = own_config.attention_config(config)
        head.lm_head = Linear(plain, "lm_head", vocabulary, own_config.hidden_size, dtype=target.dtype)
    for module in head.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta:
                made = torch.ones(parameter.shape, dtype=parameter.dtype, device=device)
                made = made if made.dim() == 1 else made.normal_(0, made.shape[1] ** -0.5)
                setattr(module, name, nn.Parameter(made, requires_grad=False))
    head.tokens = torch.arange(vocabulary, device=device)
    return head.eval()


@pytest.fixture(scope="module", params=["kimi-k2-instruct-0905", "kimi-k2-thinking"])
def model(request: pytest.FixtureRequest) -> KimiK2ForCausalLM:
    config = KimiK2Config.load(request.param).model_copy(update={"num_hidden_layers": 4})
    model = synthetic_rank(config, Layout(8, target="cuda", experts="stored"), 0, communicate=False)
    model.batch_invariant = True
    return model


@pytest.fixture(scope="module")
def batches(model: KimiK2ForCausalLM) -> list[tuple[list[list[int]], list[Step]]]:
    """Prompts, and the steps of generation without drafts."""
    draw, made = random.Random(5), [PROMPTS]
    drawn = [[draw.randrange(2000) for _ in range(draw.choice((1, 2, 17, 64, 300)))] for _ in range(DRAWN)]
    while drawn:
        size = draw.choice((1, 8, 32))
        made.append([prompt * draw.choice((1, 2)) for prompt in drawn[:size]])
        del drawn[:size]
    plain = Generator(model)
    found = [(prompts, list(plain.stream(prompts, PARAMS))) for prompts in made]
    plain.close()
    return found


class Half(NgramDrafter):
    """Knows the replies; every third of its tokens is wrong."""

    replies: list[list[int]]

    def start(self, cache: LatentCache, prompts: Sequence[Sequence[int]]) -> None:
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
    model: KimiK2ForCausalLM,
    batches: list[tuple[list[list[int]], list[Step]]],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens and log-probabilities, in batch-invariant mode, over graphs of several widths and a second generation.

    The first has steps without drafts, as every other of the drawn batches has.
    """
    monkeypatch.setattr(drafters, "MAX_GRAPHS", 3 if kind == "mla" else 8)  # some are given up and captured anew
    drafter: Drafter
    if kind in ("llama", "mla"):
        drafter = HeadDrafter(synthetic_head(model, kind), GraphRecorder)  # type: ignore[arg-type]
    else:
        drafter = NgramDrafter() if kind == "ngram" else Half()
    generator = Generator(model, drafter=drafter, draft_tokens=3, adaptive=False)
    for number, (prompts, wanted) in enumerate(batches):
        replies = [[token for token, _ in said(wanted, row) if token is not None] for row in range(len(prompts))]
        if isinstance(drafter, Half):
            drafter.replies = [reply + [0] * 8 for reply in replies]
        for off in (number % 2 > 0,) if number else (True, False):
            with monkeypatch.context() as patch:
                if off:
                    patch.setattr(DraftLength, "choose", partial(next, itertools.cycle((3, 0, 0, 1, 0, 0, 0, 0, 0, 2))))
                    patch.setattr(speculate, "PAUSE", 3)
                found = list(generator.stream(prompts, PARAMS))
            for row in range(len(prompts)):
                assert said(found, row) == said(wanted, row)
            assert kind != "half" or off or generator.stats.tokens_per_step > 1.5
    print(f"{sum(len(prompts) for prompts, _ in batches)} prompts the same")
    generator.close()
