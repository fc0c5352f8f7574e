"""Every position of the 4096 preset in BF16, executed from the HLO: three prefill buckets and decode, one application.

The graphs give logits of the last token alone; the final norm's output is captured, as NxDI captures modules. Beside it
stands transformers' own BF16 model, both against transformers in float32. The router's logits are captured too, which
tells the positions where rounding chose other experts than float32 from those where it did not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import schedule
import torch
from applications import Answer, answers
from cases import Case, Stored, job
from harness import SLOW, distances, launch

from kimi_k2.parity.reference import load_transformers_model

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


def executed(checkpoint: Path, scripts: list[schedule.Captured], timeout: float, **options: Any) -> Answer:
    """Answers of one application with several buckets a stage."""
    made = job(Case("TP1", {**CAPTURING, **options}, batch=1), checkpoint, *scripts)
    made["neuron_config"]["blockwise_matmul_config"]["block_size"] = 128
    found: Answer = launch(answers, {"": made}, way="executed", timeout=timeout)[""]
    return found


def routed(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' final hidden states [S, H] and, bool [layers, S, experts], the experts that each token goes to."""
    found: list[torch.Tensor] = []

    def keep(gate: Any, _: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        found.append(as_set(output[0], gate.n_routed_experts))

    hooks = [gate.register_forward_hook(keep) for gate in gates(model)]
    hidden = model.model(ids).last_hidden_state[0]
    for hook in hooks:
        hook.remove()
    return hidden, torch.stack(found)


def gates(model: Any) -> list[Any]:
    """transformers' routers, layer by layer."""
    return [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]


def as_set(indices: torch.Tensor, experts: int) -> torch.Tensor:
    """Chosen experts, int [S, top_k], as bool [S, experts]."""
    return torch.zeros(len(indices), experts, dtype=torch.bool).scatter(1, indices, True)


def chosen_by(logits: torch.Tensor, gate: Any) -> torch.Tensor:
    """The experts, bool [S, experts], that router logits choose."""
    scores = logits.double().sigmoid() + gate.e_score_correction_bias.double()
    return as_set(scores.topk(gate.top_k, dim=1).indices, gate.n_routed_experts)


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


@torch.inference_mode()
def test_prefill_at_every_position(stored: Stored) -> None:
    checkpoint = stored(**LONG)
    scripts = [schedule.Captured(TOKENS[:count]) for count in PROMPTS]
    done = executed(checkpoint, scripts, 400, context_encoding_buckets=BUCKETS, token_generation_buckets=[LENGTH])
    assert [bucket for _, bucket in done["calls"]] == BUCKETS
    exact, rounded = (load_transformers_model(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    for count, found in zip(PROMPTS, done["logits"], strict=True):
        check(found, TOKENS[:count], 0, exact, rounded)


@SLOW
@torch.inference_mode()
def test_decode_at_every_position(stored: Stored) -> None:
    """A prompt of 2048 tokens, as long as the preset takes, and a step at each position from there to the end."""
    checkpoint = stored(**LONG)
    buckets = {"context_encoding_buckets": [512, 2048], "token_generation_buckets": [512, 1024, 4096]}
    script = schedule.Captured(TOKENS[:2048], TOKENS[2048:])
    (found,) = executed(checkpoint, [script], 3000, max_context_length=2048, **buckets)["logits"]
    exact, rounded = (load_transformers_model(checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    check(found, TOKENS, 2048, exact, rounded)
