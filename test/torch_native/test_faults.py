"""Faults of the model, one at a time: served tokens must tell each.

A few are drawn; KIMI_K2_SLOW=1 tries all.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import line
import pytest
from faults import edited
from lowering import Lowering
from test_kernels import checkpoint

from kimi_k2.errors import KimiK2Error
from kimi_k2.neuron import layer_arguments
from kimi_k2.neuron.torch_native import attention, experts, kernels, loading, model
from kimi_k2.sharding import experts as held

pytestmark = pytest.mark.usefixtures("_short_blocks")
A, E, M, P = attention.Attention, experts.Experts, model.KimiK2ForVllmNeuron, attention.Pages
W = model.WholeLayers
ONE: dict[str, Any] = {"segment": 16, "held": "blockwise"}
RANKS: dict[str, Any] = {"segment": 16, "tp": 2, "ep": 2}
REPLICAS: dict[str, Any] = {"tp": 2, "dp": 2, "ep": 4}
KERNELS: dict[str, Any] = {"count": 1, "held": "tiles", "width": 64, "buckets": ((32,), (1,))}

# What is replaced (owner, method, piece, by), and the deployment that must tell.
FAULTS: dict[str, tuple[Any, str, str, str, dict[str, Any]]] = {
    "padding writes to the null block": (P, "write", "(slots > 0)", "(slots >= 0)", ONE),
    "padding of -1 writes to the null block": (P, "write", "(slots > 0)", "(slots > -2)", {**ONE, "padding": -1}),
    "a slot too far": (P, "write", "slots.clamp(min=0)", "(slots + 1).clamp(min=0)", ONE),
    "halves swapped in reading": (P, "read", "return k, v", "return v, k", ONE),
    "only the first half is written": (P, "write", "_put(v, place, second, kept)", "v", ONE),
    "FP8 blocks are not halved": (
        held, "halve_blocks", "halved, inexact = _halve(weight)",
        "halved, inexact = weight, _halve(weight)[1]; weight_scale_inv = weight_scale_inv / 2", ONE),
    "the compiler is not told of FP8": (M, "__init__", 'neuron_config.quantization = "fp8"', "pass", ONE),
    "pages in the order of the pool": (P, "read", "blocks.clamp(min=0)", "blocks.clamp(min=0).sort().values", ONE),
    "decode sees one position less": (A, "_absorbed", "<= positions", "< positions", ONE),
    "decode sees one position more": (A, "_absorbed", "<= positions", "<= 1 + positions", ONE),
    "decode without the scale": (A, "_absorbed", "* self.config.softmax_scale", "* 0.2", ONE),
    "a prompt sees what follows": (A, "_expanded", "<= positions", "<= 1 + positions", ONE),
    "segments start at 0 each": (A, "_expanded", "start += len(latent)", "pass", ONE),
    "an old maximum is kept": (A, "_expanded", "weight, largest = weight * kept", "weight, _ = weight * kept", ONE),
    "the running sum is not rescaled": (A, "_expanded", "total = total * kept", "total = total", ONE),
    "a segment sees itself alone": (A, "_keys", "if not segment", "if True", ONE),
    "W_UK and W_UV swapped": (A, "_absorbed", "w_uk, w_uv =", "w_uv, w_uk =", ONE),
    "latents are not normed": (A, "__call__", 'rms_norm(latent, self._of("kv_a_layernorm"), eps)', "latent", ONE),
    "keys are not rotated": (A, "__call__", "rotate(k_rope, cos, sin)", "k_rope", ONE),
    "weights of other ranks' experts are kept": (
        E, "_routed", "torch.where(inside, topk_weights, torch.zeros_like(topk_weights))", "topk_weights", RANKS),
    "local numbers are global ones": (E, "__call__", "topk_indices - self.first", "topk_indices", RANKS),
    "scales of a block are the first block's": (
        experts, "scaled_matmul", "(sums * spread)", "(sums * spread[:1])", ONE),
    "a block begins where the last one ends": (E, "_blocks", "// block * block", "", ONE),
    "a choice gets the next one's output": (
        E, "_blocks", "scatter(0, order, place)", "scatter(0, order, place.roll(1))", RANKS),
    "the shared expert is left out": (
        model.Layer, "_feed_forward", "out + mlp(x, shared)", "out", ONE),
    "bias in the weights": (experts, "route", "norm_topk_prob=config.norm_topk_prob", "norm_topk_prob=False", ONE),
    "tokens of the next rank": (M, "forward", "rank.view(1)", "(size - 1 - rank).view(1)", RANKS),
    "replicas keep their tokens' sums": (
        model.Layer, "_feed_forward", "dp.reduce_scatter(out, 0)", "out[: len(x)]", REPLICAS),
    "replicas load the first one's experts": (
        loading, "_from_checkpoint", "experts_of(ranks.moe_rank)", "experts_of(ranks.rank)", REPLICAS),
    "an expert's neighbour is loaded": (
        loading, "_from_checkpoint", "part.expert - ", "-part.expert - 1 + 2 * ", RANKS),
    "a rank's columns are the first rank's": (
        loading, "_from_checkpoint", "tensor.local(part.tensor, ranks.rank)", "tensor.local(part.tensor, 0)", RANKS),
    "a slot less is seen": (W, "__init__", "[:, :1].to(", "[:, :1].sub(1).to(", KERNELS),
    "down projections stay the first layer's": (W, "__call__", "if len(entries) > 2", "if False", KERNELS),
    "the residual stays the first layer's": (W, "__call__", "self.hidden = hidden =", "hidden =", KERNELS),
    "new latents lie in another order": (W, "__call__", "entries[0][0],", "entries[0][0].flip(-1),", KERNELS),
    "sines have no sign": (layer_arguments, "rotation", "(-sines, sines)", "(sines, sines)", KERNELS),
    "the norm's scalar is left in": (layer_arguments, "without_scalar", "* torch.sqrt(mean + eps)", "", KERNELS),
    "runs of another page": (
        kernels.Kernels, "runs", "table.clamp(min=0)", "table.clamp(min=0).roll(1, 1)", KERNELS),
}  # fmt: skip
SLOW = bool(os.environ.get("KIMI_K2_SLOW"))


def tells(directory: Path, *, lowering: Any = line.eager, **options: Any) -> bool:
    """Whether something goes wrong: in an error, in a token or a logit, or in the null block."""
    try:
        ranks = line.served(directory, compile_with=lowering, **options)
        return not all(
            wrong == 0 and off < 2e-5 for wrong, off in (line.differences(directory, rank) for rank in ranks)
        )
    except (KimiK2Error, RuntimeError, IndexError, AssertionError):
        return True


@pytest.mark.parametrize("name", [*FAULTS][:: 1 if SLOW else 9])
def test_each_is_seen(checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By eight drawn prompts; of the kernels, on the emulator, by one."""
    owner, method, old, new, options = FAULTS[name]
    target, attribute, made = edited(owner, method, old, new)
    monkeypatch.setattr(target, attribute, made)
    if owner is experts and hasattr(model, method):
        monkeypatch.setattr(model, method, made)
    # What the device makes of FP8 is seen on a route alone.
    lowering, directory = Lowering(("fx",)) if "halved" in name else line.eager, checkpoints["fp8"]
    if options is KERNELS:
        directory = checkpoint(tmp_path, 1, 1, 1)
        line.with_kernels(monkeypatch, 1)
    assert tells(directory, lowering=lowering, **options)


@pytest.mark.parametrize("view", ["", ".view({0}.shape)"])
def test_who_reads_pages_from_before_a_write_is_seen(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, view: str
) -> None:
    """Where what the write gives is not read: the routes differ; through a view the write itself is refused."""
    pages = "return Pages(_put(k, place, first, kept), _put(v, place, second, kept), self.kernels)"
    k, v = (f"{half}{view.format(half)}" for half in "kv")
    written = f"_put({k}, place, first, kept); _put({v}, place, second, kept); return self"
    monkeypatch.setattr(*edited(P, "write", pages, written))
    assert tells(checkpoints["fp8"], lowering=Lowering(), **ONE)
