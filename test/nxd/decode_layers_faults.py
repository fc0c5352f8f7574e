"""Faults put into the wiring of whole layers one at a time, in CPU mode: the largest distance of each to a reference.

A worker as cpu_worker.py; the job's `expected` is a file with the plain model's logits. Every rank has the same fault.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import cpu_worker
import environment
import torch
from faults import Patch, edited
from steps import run

from nki_emulator import ranks as nki_ranks

tiles = environment.contrib("attention_tiles")
whole, early = environment.contrib("decode_layers"), environment.contrib("early_qkv_a")
W, K = whole.WholeLayers, whole.DecodeLayersKernel


def layer_fault(old: str, new: str) -> Callable[[], Patch]:
    return lambda: edited(whole, "layer_tensors", old, new)


def step_fault(old: str, new: str) -> Callable[[], Patch]:
    return lambda: edited(W, "run", old, new)


FAULTS: dict[str, Callable[[], Patch]] = {
    "a slot too many": step_fault("sum(dim=1)", "sum(dim=1).add(1)"),
    "softmax scale without mscale": step_fault("hf.softmax_scale", "hf.qk_head_dim**-0.5"),
    "weights unscaled": step_fault("hf.routed_scaling_factor", "1.0"),
    "one epsilon for all norms": step_fault("hf.latent_norm_eps", "hf.rms_norm_eps"),
    "the other epsilon for all norms": step_fault('"eps": hf.rms_norm_eps', '"eps": hf.latent_norm_eps'),
    "every rank holds the first experts": step_fault("view(-1)\n", "view(-1) * 0\n"),
    "projections with the norm's scalar": step_fault("projected.flatten(0, 1)", "0.5 * projected.flatten(0, 1)"),
    "rotated for the position before": step_fault(
        "position_ids.reshape(tokens, 1)", "position_ids.reshape(tokens, 1) - 1"),
    "residual of the layers before lost": step_fault("hidden_states.flatten(0, 1)", "0 * hidden_states.flatten(0, 1)"),
    "entries in the wrong order": step_fault("latents.unbind(0)", "latents.flip(0).unbind(0)"),
    "new latents lost": step_fault(" latent.unflatten(", " 0 * latent.unflatten("),
    "new keys lost": step_fault("(key.unflatten(", "(0 * key.unflatten("),
    "caches of the layers before": step_fault(
        "zip(self.layers, self.caches,", "zip(self.layers, self.caches[1:] + self.caches[:1],"),
    "norms swapped": layer_fault(
        '"q_norm": attention.q_a_layernorm.weight', '"q_norm": attention.kv_a_layernorm.weight'),
    "input_layernorm before the experts": layer_fault("layer.post_attention_layernorm", "layer.input_layernorm"),
    "no correction bias": layer_fault(
        "layer.mlp.router.e_score_correction_bias.unsqueeze(0)", "0 * layer.mlp.router.e_score_correction_bias[None]"),
    "residual not in the logits": layer_fault(
        "layer.early_router.residual_weight", "0 * layer.early_router.residual_weight"),
    "heads not in the logits": layer_fault(
        "layer.early_router.heads_weight", "0 * layer.early_router.heads_weight"),
    "residual not in the next projections": layer_fault(
        "layer.early_qkv_a.residual_weight", "0 * layer.early_qkv_a.residual_weight"),
    "experts not in the next projections": layer_fault("routed.early_qkv_a.weight", "0 * routed.early_qkv_a.weight"),
    "shared expert not in the next projections": layer_fault(
        "shared.early_qkv_a.weight.squeeze(0)", "0 * shared.early_qkv_a.weight.squeeze(0)"),
    "shared expert's gate and up swapped": layer_fault(
        '": part for', '": part.flip(-1) for'),
    "a rank's summand lost": lambda: edited(
        nki_ranks.RankOfProcess, "exchange", "brought for _, brought in found",
        "found[0][1] for _, brought in found"),
    "every rank is the first": lambda: edited(K, "call", "torch.distributed.get_rank()", "0"),
    "the dense layer hands on nothing": lambda: edited(
        early.Following, "take_sums", "return sums", "return None if sums is None else 0 * sums"),
}  # fmt: skip


SPLIT_FAULTS: dict[str, Callable[[], Patch]] = {
    "every rank counts the new entry": step_fault("own.reshape(tokens, 1)", "torch.ones(tokens, 1)"),
    "no rank counts the new entry": step_fault("own.reshape(tokens, 1)", "torch.zeros(tokens, 1)"),
    "ranks paired otherwise": lambda: edited(
        K, "call", "tuple(range(first, first + self.group)) for first in firsts",
        "tuple(range(first, self.ranks, self.group)) for first in range(self.group)"),
    "heads of the cores swapped": lambda: edited(
        tiles.AttentionTiles, "of_group", "found[field] = tile.weight", "found[field] = tile.weight.flip(0)"),
    "W_UK of the cores swapped": lambda: edited(
        tiles.AttentionTiles, "of_group", "found[field] = tile.weight",
        "found[field] = tile.weight.flip(0) if field == 'w_uk' else tile.weight"),
    "a slot too many": step_fault("sum(dim=1)", "sum(dim=1).add(1)"),
}  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    expected = torch.load(job["expected"])
    case = job["cases"][0]
    app = cpu_worker.build(job)

    def distance() -> float:
        app.reset()
        return float((run(app, case["prompts"], case["forced"]) - expected).abs().max())

    found = {"none": distance()}
    faults = SPLIT_FAULTS if job["neuron_config"].get("flash_decoding_enabled") else FAULTS
    for name, make in faults.items():
        owner, attribute, made = make()
        with mock.patch.object(owner, attribute, made):
            found[name] = distance()
    if torch.distributed.get_rank() == 0:
        torch.save(found, job["output"])
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
