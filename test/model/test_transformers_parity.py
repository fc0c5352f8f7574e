"""The whole model against transformers' DeepseekV3ForCausalLM on the same checkpoint files, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain import along

from kimi_k2.engine.generate import generate
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.parity.reference import MissingLibraryError, load_transformers_model

TOLERANCE = 1e-5
DECODE_STEPS = 32


def reference_of(directory: Path) -> Any:
    """transformers' model, or a skip that says which library is missing."""
    try:
        return load_transformers_model(directory)
    except MissingLibraryError as error:
        pytest.skip(str(error))


def prompts_of(lengths: list[int], vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("name", ["bf16", "fp8", "thinking", "k2.5"])
@pytest.mark.parametrize("lengths", [[37], [5, 41, 18]], ids=["batch1", "ragged3"])
@torch.inference_mode()
def test_prefill_and_32_decode_steps(checkpoints: dict[str, Path], name: str, lengths: list[int]) -> None:
    directory = checkpoints[name]
    model = KimiK2ForCausalLM.from_pretrained(directory)
    reference = reference_of(directory)
    prompts = prompts_of(lengths, model.config.vocab_size)

    out = generate(model, prompts, SamplingParams(max_new_tokens=DECODE_STEPS + 1, ignore_eos=True))
    # One uncached pass of the reference a sequence; what it would choose after each token is what came next.
    full = [reference(torch.tensor([prompt + tokens])).logits[0] for prompt, tokens in zip(prompts, out, strict=True)]
    for length, rows, chosen in zip(lengths, full, out, strict=True):
        assert rows[length - 1 : -1].argmax(dim=-1).tolist() == chosen
    worst = max(
        float((logits[row] - full[row][length + step - 1]).abs().max())
        for step, logits in enumerate(along(model, prompts, out))
        for row, length in enumerate(lengths)
    )
    print(f"\n{name} {lengths}: max |logit difference| {worst:.2e} on logits up to {full[0].abs().max():.2f}")
    assert worst <= TOLERANCE


@torch.inference_mode()
def test_router_bias_of_the_synthetic_checkpoint_decides_choices(bf16: Path) -> None:
    """Parity would be blind to a misplaced bias if zeroing it changed nothing."""
    reference = reference_of(bf16)
    ids = torch.tensor(prompts_of([64], 768))
    gate = reference.model.layers[1].mlp.gate
    chosen: list[torch.Tensor] = []

    def keep(*arguments: Any) -> None:
        (indices,) = [output for output in arguments[2] if not output.is_floating_point()]
        chosen.append(indices.sort(dim=-1).values)

    gate.register_forward_hook(keep)
    reference(ids)
    gate.e_score_correction_bias.zero_()
    reference(ids)
    changed = (chosen[0] != chosen[1]).any(dim=-1).float().mean()
    assert changed > 0.5
