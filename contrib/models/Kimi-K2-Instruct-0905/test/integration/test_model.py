"""Smoke, generation, coherence, logit match and token times, on a trn2.48xlarge with the real checkpoint.

The tiny model runs in NxD's CPU mode wherever NxD is importable.

    KIMI_K2_MODEL=/models/Kimi-K2-Instruct-0905 KIMI_K2_COMPILED=/compiled pytest -m neuron test/integration
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.neuron import compile as job
from kimi_k2.neuron import contrib
from kimi_k2.neuron.compiler_args import environment
from kimi_k2.parity.golden import load_golden
from kimi_k2.parity.logits import DIVERGENCE_TOLERANCE, TOLERANCE_MAP
from kimi_k2.parity.trace import PHASES
from kimi_k2.plan.deployment import Deployment
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

NXD_TESTS = Path(__file__).parents[5] / "test" / "nxd"
PRESET = os.environ.get("KIMI_K2_PRESET", "trn2-tp64-ep1")
MODEL, COMPILED = os.environ.get("KIMI_K2_MODEL"), os.environ.get("KIMI_K2_COMPILED")
GOLDEN = os.environ.get("KIMI_K2_GOLDEN")  # directory that `kimi-k2 parity capture --greedy` wrote

on_neuron = pytest.mark.neuron
needs_neuron = pytest.mark.skipif(
    shutil.which("neuronx-cc") is None or not MODEL or not COMPILED,
    reason="needs a trn2.48xlarge with the Neuron SDK, KIMI_K2_MODEL and KIMI_K2_COMPILED",
)
needs_nxd = pytest.mark.skipif(bool(contrib.missing()), reason=f"needs NxD and NxDI: {', '.join(contrib.missing())}")


# -- tiny model, CPU mode ----------------------------------------------------------------------------


@needs_nxd
@pytest.mark.nxd
def test_tiny_model_in_cpu_mode(tmp_path: Path) -> None:
    """Logits of prefill and 16 decode steps against the plain model."""
    sys.path.insert(0, str(NXD_TESTS))
    import harness

    checkpoint = tmp_path / "bf16"
    write_synthetic_checkpoint(checkpoint, with_format(tiny_config("kimi-k2-instruct-0905"), "bf16"), seed=1)
    case = harness.sequences(1, 512)
    options = harness.neuron_config(1, 1, 1)
    (logits,) = harness.launch({"checkpoint": checkpoint, "neuron_config": options, "cases": [case]}, tmp_path)
    expected = harness.expected_logits(harness.plain_model(checkpoint), case)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


# -- the real model on Trainium ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def app() -> Any:
    """The loaded application; compile it first with scripts/compile.py."""
    preset = Deployment.load(PRESET)
    os.environ.update(environment(preset))
    assert MODEL and COMPILED
    application = job.build_application(preset, KimiK2Config.load(MODEL), MODEL)
    application.load(COMPILED)
    return application


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The checkpoint's tokenizer, by this project."""
    from kimi_k2.tokenization.tokenizer import KimiTokenizer

    assert MODEL
    return KimiTokenizer.from_pretrained(MODEL)


def greedy(app: Any, prompt: list[int], steps: int) -> tuple[list[int], list[float]]:
    """Token ids and seconds of each step; the first is the time to the first token."""
    app.reset()
    ids = torch.tensor([prompt])
    tokens: list[int] = []
    seconds: list[float] = []
    inputs, positions = ids, torch.arange(len(prompt))[None]
    for step in range(steps):
        # The decode mask covers the cache only, without the current token.
        mask = torch.ones(1, len(prompt) + max(step - 1, 0), dtype=torch.int32)
        start = time.perf_counter()
        out = app(input_ids=inputs, attention_mask=mask, position_ids=positions)
        chosen = out.tokens if getattr(out, "tokens", None) is not None else out.logits[:, -1].argmax(-1)
        token = int(torch.as_tensor(chosen).flatten()[0])
        seconds.append(time.perf_counter() - start)
        tokens.append(token)
        inputs, positions = torch.tensor([[token]]), torch.tensor([[len(prompt) + step]])
    return tokens, seconds


@on_neuron
@needs_neuron
def test_smoke(app: Any) -> None:
    tokens, _ = greedy(app, [1, 2, 3], 1)
    assert 0 <= tokens[0] < 163840


@on_neuron
@needs_neuron
def test_generation_is_coherent(app: Any, tokenizer: Any) -> None:
    tokens, _ = greedy(app, tokenizer.encode("The capital of France is"), 24)
    text = tokenizer.decode(tokens)
    assert "Paris" in text
    assert len(set(tokens)) > len(tokens) // 3  # no loop on a few tokens


@on_neuron
@needs_neuron
@pytest.mark.skipif(not GOLDEN, reason="needs KIMI_K2_GOLDEN, logits of the plain model")
def test_logits_match_the_golden_ones() -> None:
    """NxDI's own method: teacher forcing and its tolerance map. Needs a graph without on-device sampling."""
    from neuronx_distributed_inference.utils.accuracy import check_accuracy_logits_v2
    from transformers import GenerationConfig

    preset = Deployment.load(PRESET)
    assert MODEL and COMPILED and GOLDEN
    application = job.build_application(preset, KimiK2Config.load(MODEL), MODEL, on_device_sampling_config=None)
    application.load(f"{COMPILED}-logits")
    trace = load_golden(GOLDEN).trace
    prompt = torch.tensor([list(trace.inputs.prompt)])
    logits = torch.cat([trace.logits(phase) for phase in PHASES])[:, None]
    check_accuracy_logits_v2(
        application,
        expected_logits=logits,
        inputs_input_ids=prompt,
        inputs_attention_mask=torch.ones_like(prompt),
        generation_config=GenerationConfig(do_sample=False, max_new_tokens=len(logits)),
        divergence_difference_tol=DIVERGENCE_TOLERANCE,
        tol_map=TOLERANCE_MAP,
    )


@on_neuron
@needs_neuron
def test_time_per_token_is_reported_without_the_first(app: Any) -> None:
    _, seconds = greedy(app, list(range(100, 228)), 129)
    rest = sorted(seconds[1:])
    print(f"\nTTFT {seconds[0] * 1e3:.1f} ms, TPOT median {rest[64] * 1e3:.2f} ms, p99 {rest[126] * 1e3:.2f} ms")
    assert rest[64] < seconds[0]
