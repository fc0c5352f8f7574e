"""Every position of the 4096 preset in BF16, executed from the HLO: three prefill buckets and decode, one application.

The graphs give logits of the last token alone; the final norm's output is captured, as NxDI captures modules. Beside it
stands transformers' own BF16 model, both against transformers in float32. The router's logits are captured too, which
tells the positions where rounding chose other experts than float32 from those where it did not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import SLOW, distances, execute, neuron_config

from kimi_k2.parity.reference import load_transformers_model

LENGTH = 4096
BUCKETS = [512, 2048, 4096]
CAPTURED = ["norm", "layers.1.mlp.router", "layers.2.mlp.router"]  # layer 0 is dense
FAR = 0.1  # farther off are those positions, and only those, whose experts are others than in float32
PROMPTS = [500, 2047, 4096]  # one a bucket; NxDI takes the next one for a prompt that fills any but the last


def tokens(count: int) -> list[int]:
    """The first of one random sequence."""
    drawn: list[int] = torch.randint(0, 512, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
    return drawn[:count]


def job(checkpoint: Path, **options: Any) -> dict[str, Any]:
    """One application with several buckets a stage."""
    chosen = neuron_config(1, 1, 1, seq_len=LENGTH, torch_dtype="bfloat16", enable_bucketing=True, **options)
    chosen["blockwise_matmul_config"]["block_size"] = 128
    return {"checkpoint": checkpoint, "neuron_config": chosen}


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


def same(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """bool [S]: the same experts in every layer; both bool [layers, S, experts]."""
    return (found == expected).all(dim=-1).all(dim=0)


def stated(name: str, found: torch.Tensor) -> str:
    """Median, mean, 99th percentile and largest."""
    figures = (found.median(), found.mean(), found.quantile(0.99), found.max())
    return f"{name} {' / '.join(f'{float(one):.4f}' for one in figures)}"


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
    our_experts = torch.stack([chosen_by(one, gate) for one, gate in zip(logits, gates(exact), strict=True)])
    ours, theirs = (distances(one, expected)[start:] for one in (hidden, rounded_hidden))
    assert ours.shape == (len(ids) - start,)
    closer = 100 * float((ours <= theirs).float().mean())
    print(f"\npositions {start}..{len(ids) - 1}, relative L2, median / mean / 99 % / largest: {stated('ours', ours)},")
    print(f"{stated('transformers in BF16', theirs)}; ours is closer at {closer:.0f} % of them")
    ours_same, theirs_same = (same(experts, exact_experts)[start:] for experts in (our_experts, rounded_experts))
    for name, error, agrees in (("ours", ours, ours_same), ("transformers", theirs, theirs_same)):
        print(f"{name}: other experts than in float32 at {int((~agrees).sum())} positions, at least", end=" ")
        print(f"{error[~agrees].min():.3f} off; elsewhere {error[agrees].max():.4f} at most")
        assert bool((error[agrees] < FAR).all())
        assert bool((error[~agrees] > FAR).all())
    assert float(ours[ours_same].max()) <= float(theirs[theirs_same].max())
    assert float(ours.median()) <= float(theirs.median())
    assert float(ours.mean()) <= float(theirs.mean())


CAPTURING: dict[str, Any] = {
    "on_device_sampling_config": {"top_k_kernel_enabled": False}, "output_logits": True, "disable_argmax_kernel": True,
    "tensor_capture_config": {"modules_to_capture": CAPTURED},
}  # fmt: skip


@torch.inference_mode()
def test_prefill_at_every_position(long_checkpoint: Path, tmp_path: Path) -> None:
    options = {"context_encoding_buckets": BUCKETS, "token_generation_buckets": [LENGTH], **CAPTURING}
    cases = [{"capture": tokens(count)} for count in PROMPTS]
    done = execute({**job(long_checkpoint, **options), "cases": cases}, tmp_path)
    assert [bucket for _, bucket in done["calls"]] == BUCKETS
    exact, rounded = (load_transformers_model(long_checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    for count, found in zip(PROMPTS, done["logits"], strict=True):
        check(found, tokens(count), 0, exact, rounded)


@SLOW
@torch.inference_mode()
def test_decode_at_every_position(long_checkpoint: Path, tmp_path: Path) -> None:
    """A prompt of 2048 tokens, as long as the preset takes, and a step at each position from there to the end."""
    options = {"context_encoding_buckets": [512, 2048], "token_generation_buckets": [512, 1024, 4096], **CAPTURING}
    made = job(long_checkpoint, **options)
    made["neuron_config"]["max_context_length"] = 2048
    case = {"capture": tokens(2048), "forced": tokens(LENGTH)[2048:]}
    (found,) = execute({**made, "cases": [case]}, tmp_path, timeout=3000)["logits"]
    exact, rounded = (load_transformers_model(long_checkpoint, dtype) for dtype in (torch.float32, torch.bfloat16))
    check(found, tokens(LENGTH), 2048, exact, rounded)
