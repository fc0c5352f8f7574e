"""Drafts in CPU mode through NxDI's own adapter: the tokens are plain greedy decoding's, whatever the draft says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from harness import launch, neuron_config, plain_model

from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

WORKER = Path(__file__).with_name("assisted_worker.py")
WIDTH = 4
NEW_TOKENS = 20
PROMPT = [5, 17, 300, 41, 8, 99, 23]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and a draft that shares nothing with it."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("target", "stranger")):
        config = with_format(tiny_config(num_hidden_layers=2), "bf16")
        write_synthetic_checkpoint(root / name, config, seed=seed)
    return {name: root / name for name in ("target", "stranger")}


@pytest.mark.parametrize(("draft", "ranks"), [("target", 1), ("stranger", 2)])
def test_assisted_decoding_is_greedy(models: dict[str, Path], tmp_path: Path, draft: str, ranks: int) -> None:
    """A draft that is the target is always right, and saves steps; a stranger is nearly always wrong."""
    if not environment.adapter_runs():
        pytest.skip("HuggingFaceGenerationAdapter of NxDI 0.8 reads a name that it never sets")
    job: dict[str, Any] = {
        "checkpoint": models["target"],
        "draft": str(models[draft]),
        "neuron_config": neuron_config(ranks, 1, 1, speculation_length=WIDTH),
        "prompt": PROMPT,
        "new_tokens": NEW_TOKENS,
    }
    answer = launch(job, tmp_path, worker=WORKER)
    with torch.inference_mode():
        params = SamplingParams(NEW_TOKENS, ignore_eos=True)
        greedy = generate(plain_model(models["target"]), [PROMPT], params).token_ids[0]
    found = answer["tokens"][len(PROMPT) :]
    # NxDI stops where fewer tokens are left than a step takes.
    assert NEW_TOKENS - WIDTH < len(found) <= NEW_TOKENS
    assert found == greedy[: len(found)]
    print(f"\n{len(found)} tokens in {answer['steps']} steps behind the prompt")
    assert (answer["steps"] <= -(-NEW_TOKENS // WIDTH)) == (draft == "target")
