"""The compiled model on a trn2.48xlarge: smoke, generation, coherence, logit match, time to first and per token.

    KIMI_K2_MODEL=/models/Kimi-K2-Instruct-0905 KIMI_K2_COMPILED=/compiled pytest -m neuron test/integration

KIMI_K2_MODEL needs the tokenizer's files. KIMI_K2_GOLDEN is what `kimi-k2 parity capture --greedy` wrote, for graphs
that return logits (`kimi-k2 compile --capture-layers`). KIMI_K2_EXPECTED replaces expected.yaml beside this file.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

pytest.importorskip("kimi_k2", reason="needs the kimi_k2 package (pip install -e . of its repository)")

from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.neuron.application import NeuronApplication
from kimi_k2.parity.golden import load_golden
from kimi_k2.parity.trace import PHASES
from kimi_k2.tokenization.tokenizer import KimiTokenizer

MODEL, COMPILED = os.environ.get("KIMI_K2_MODEL"), os.environ.get("KIMI_K2_COMPILED")
GOLDEN = os.environ.get("KIMI_K2_GOLDEN")
EXPECTED = Path(os.environ.get("KIMI_K2_EXPECTED", Path(__file__).with_name("expected.yaml")))

pytestmark = [
    pytest.mark.neuron,
    pytest.mark.skipif(
        shutil.which("neuronx-cc") is None or not MODEL or not COMPILED,
        reason="needs a trn2.48xlarge with the Neuron SDK, KIMI_K2_MODEL and KIMI_K2_COMPILED",
    ),
]


@pytest.fixture(scope="module")
def app() -> NeuronApplication:
    """The loaded application."""
    assert COMPILED
    return NeuronApplication.open(Path(COMPILED))


@pytest.fixture(scope="module")
def tokenizer() -> KimiTokenizer:
    """The checkpoint's tokenizer, by this project."""
    assert MODEL
    return KimiTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """What expected.yaml says."""
    content: dict[str, Any] = yaml.safe_load(EXPECTED.read_text(encoding="utf-8"))
    assert COMPILED
    made_from = json.loads((Path(COMPILED) / "compile.json").read_text(encoding="utf-8"))["made_from"]
    bounds: dict[str, float] = content.get("bounds", {}).get(made_from["preset"], {})
    return content | bounds


def greedy(app: NeuronApplication, prompt: list[int], steps: int) -> tuple[list[int], list[float]]:
    """Token ids and seconds of each step; the first is the time to the first token."""
    taken = list(app.stream([prompt], SamplingParams(max_new_tokens=steps, ignore_eos=True)))
    tokens = [step.tokens[0] for step in taken]
    return [token for token in tokens if token is not None], [step.seconds for step in taken]


def test_smoke(app: NeuronApplication) -> None:
    """One pass of each graph."""
    tokens, _ = greedy(app, [1, 2, 3], 2)
    assert len(tokens) == 2
    assert all(0 <= token < app.app.config.vocab_size for token in tokens)


def test_generation(app: NeuronApplication, expected: dict[str, Any]) -> None:
    """As many tokens as asked for, the same ones again, whatever was generated between."""
    prompt, steps = list(range(100, 116)), expected["new_tokens"]
    first, _ = greedy(app, prompt, steps)
    assert len(first) == steps
    greedy(app, prompt[::-1], steps)
    assert greedy(app, prompt, steps)[0] == first


def test_coherence(app: NeuronApplication, tokenizer: KimiTokenizer, expected: dict[str, Any]) -> None:
    """The text says what it must and does not circle in a few tokens."""
    tokens, _ = greedy(app, tokenizer.encode(expected["prompt"]), expected["new_tokens"])
    # An end among the first tokens is passed over, as the published port masks it; a later one ends the text.
    early, stops = tokens[: expected["min_tokens_before_eos"]], tokenizer.stop_token_ids
    tokens = [token for token in early if token not in stops] + tokens[len(early) :]
    text = tokenizer.decode(list(takewhile(lambda token: token not in stops, tokens)))
    assert expected["reply"] in text, text
    assert len(set(tokens)) > len(tokens) // 3, text


@pytest.mark.skipif(not GOLDEN, reason="needs KIMI_K2_GOLDEN, what `kimi-k2 parity capture --greedy` wrote")
def test_logits_match_the_golden_ones(app: NeuronApplication) -> None:
    """NxDI's own logit_validation: teacher forcing, its tolerances."""
    from neuronx_distributed_inference.experimental.core.accuracy.logit_validation import (
        DEFAULT_TOLERANCE_MAP,
        logit_validation,
    )

    if not app.options.output_logits:
        pytest.skip("needs graphs that return logits: kimi-k2 compile --capture-layers 0")
    assert GOLDEN
    trace = load_golden(GOLDEN).trace
    prompt = list(trace.inputs.prompt)
    golden = torch.cat([trace.logits(phase) for phase in PHASES])[:, None]

    def continue_from(input_ids: Any) -> Tensor:
        """Logits [steps, 1, vocab_size] of the greedy continuation, as long as the golden run."""
        ids = torch.as_tensor(input_ids).reshape(-1).tolist()
        output = app.prefill([ids])
        rows = [output.logits]
        for position in range(len(ids), len(prompt) + len(golden) - 1):
            assert output.logits is not None
            output = app.decode(output.logits.argmax(-1), torch.tensor([position]))
            rows.append(output.logits)
        return torch.stack([row.float() for row in rows if row is not None])

    # A small test model has fewer tokens than the highest k.
    tolerances = {k: bound for k, bound in DEFAULT_TOLERANCE_MAP.items() if k == "all" or int(k) <= golden.shape[-1]}
    assert logit_validation([prompt], continue_from, golden, tolerances) is True  # what differs is printed


def test_time_to_first_token(app: NeuronApplication, expected: dict[str, Any]) -> None:
    """Median of five prefills of the longest prompt."""
    prompt = [100 + place % 1000 for place in range(min(app.longest_prompt, app.length - 1))]
    taken = [greedy(app, prompt, 1)[1][0] * 1e3 for _ in range(5)]
    print(f"\nTTFT of {len(prompt)} tokens: {statistics.median(taken):.1f} ms")
    assert statistics.median(taken) <= expected["ttft_ms"]


def test_time_per_output_token(app: NeuronApplication, expected: dict[str, Any]) -> None:
    """Median of the steps after the first, which is the prefill's."""
    prompt = list(range(100, 100 + min(128, app.longest_prompt // 2)))
    _, seconds = greedy(app, prompt, min(129, app.length - len(prompt)))
    rest = [1e3 * one for one in seconds[1:]]
    print(f"\nTPOT median {statistics.median(rest):.2f} ms, P99 {statistics.quantiles(rest, n=100)[98]:.2f} ms")
    assert statistics.median(rest) <= expected["tpot_ms"]
