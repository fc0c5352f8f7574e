"""Every position of the 4096 preset in BF16, executed from the HLO: three prefill buckets and decode, one application.

The graphs give logits of the last token alone; the final norm's output is captured, as NxDI captures modules. Beside it
stands transformers' own BF16 model, both against transformers in float32. The router's logits are captured too, which
tells the positions where rounding chose other experts than float32 from those where it did not.
"""

from __future__ import annotations

from typing import Any

import pytest
import schedule
import torch
from applications import answers
from cases import Case, Stored, job
from harness import SLOW, distances, launch
from schedule import Captured

from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.plan.deployment import CONTEXT_ENCODING

LENGTH = 4096
LONG: dict[str, Any] = {"max_position_embeddings": 262144, "seed": 7}
BUCKETS = [512, 2048, 4096]
CAPTURED = ["norm", "layers.1.mlp.router", "layers.2.mlp.router"]  # layer 0 is dense
FAR = 0.1  # farther off are those positions, and only those, whose experts are others than in float32
PROMPTS = [500, 2047, 4096]  # one a bucket; NxDI takes the next one for a prompt that fills any but the last
TOKENS = schedule.drawn(1, LENGTH, seed=5)[0]
CAPTURING: dict[str, Any] = {
    "on_device_sampling_config": {"top_k_kernel_enabled": False}, "output_logits": True, "disable_argmax_kernel": True,
    "tensor_capture_config": {"modules_to_capture": CAPTURED}, "torch_dtype": "bfloat16", "enable_bucketing": True,
    "seq_len": LENGTH,
}  # fmt: skip


def routed(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' final hidden states [S, H] and, [layers, S, top_k], the experts that each token goes to."""
    found: list[torch.Tensor] = []
    hooks = [gate.register_forward_hook(lambda *given: found.append(given[2][0])) for gate in gates(model)]
    hidden = model.model(ids).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return hidden, torch.stack(found).sort().values


def gates(model: Any) -> list[Any]:
    """transformers' routers, layer by layer."""
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def chosen_by(logits: torch.Tensor, gate: Any) -> torch.Tensor:
    """The experts [S, top_k] that router logits choose."""
    scores = logits.double().sigmoid() + gate.e_score_correction_bias.double()
    chosen: torch.Tensor = scores.topk(gate.top_k, dim=1).indices
    return chosen.sort().values


def check(found: list[torch.Tensor], ids: list[int], start: int, exact: Any, rounded: Any) -> None:
    """Hold the positions from `start` to transformers in float32, beside transformers' BF16 model.

    Args:
        found: what CAPTURED gave, each [S, width].
        ids: the S tokens.
        start: first position that is compared.
        exact: transformers' model in float32.
        rounded: the same in BF16.
    """
    hidden, *logits = found
    expected, exact_experts = routed(exact, torch.tensor([ids]))
    rounded_hidden, rounded_experts = routed(rounded, torch.tensor([ids]))
    our_experts = torch.stack([chosen_by(logit, gate) for logit, gate in zip(logits, gates(exact), strict=True)])
    figures, print_at = [], f"\npositions {start}..{len(ids) - 1}"
    for name, one, experts in (("ours", hidden, our_experts), ("transformers", rounded_hidden, rounded_experts)):
        error, same = distances(one, expected)[start:], (experts == exact_experts).all(dim=-1).all(dim=0)[start:]
        assert error.shape == (len(ids) - start,)
        # The largest of all is one position's chance; FAR bounds it.
        figures.append((float(error[same].quantile(0.99)), float(error.median()), float(error.mean())))
        said = " / ".join(f"{figure:.4f}" for figure in figures[-1])
        print(f"{print_at}, {name}: 99 % with float32's experts / median / mean {said}; others {int((~same).sum())}")
        assert bool((error[same] < FAR).all())
        assert bool((error[~same] > FAR).all())
    assert all(ours <= theirs for ours, theirs in zip(*figures, strict=True))


@pytest.mark.parametrize(("scripts", "start", "options"), [
    pytest.param(
        [Captured(TOKENS[:count]) for count in PROMPTS], 0,
        {"context_encoding_buckets": BUCKETS, "token_generation_buckets": [LENGTH]}, id="prefill",
    ),
    pytest.param(  # a prompt as long as the preset takes, and a step at each position from there to the end
        [Captured(TOKENS[:2048], TOKENS[2048:])], 2048,
        {"max_context_length": 2048, "context_encoding_buckets": [512, 2048],
         "token_generation_buckets": [512, 1024, 4096]}, id="decode", marks=SLOW,
    ),
])  # fmt: skip
@torch.inference_mode()
def test_every_position(stored: Stored, scripts: list[Captured], start: int, options: dict[str, Any]) -> None:
    checkpoint = stored(**LONG)
    made = job(Case("TP1", {**CAPTURING, **options}, batch=1), checkpoint, *scripts)
    made["neuron_config"]["blockwise_matmul_config"]["block_size"] = 128
    done = launch(answers, {"": made}, way="executed", timeout=3000)[""]
    prefills = [bucket for stage, bucket in done["calls"] if stage == CONTEXT_ENCODING]
    assert prefills == options["context_encoding_buckets"][-len(scripts) :]
    exact, rounded = (load_transformers_model(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    for script, found in zip(scripts, done["logits"], strict=True):
        check(found, [*script.prompt, *script.forced], start, exact, rounded)
