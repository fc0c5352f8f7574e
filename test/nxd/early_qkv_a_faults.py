"""Faults in early down projections: their slices, folds, scalar, and their sum over experts and ranks.

Logits of executed float32 graphs on two ranks; four sequences choose more experts than a rank of EP2 holds, so that its
case computes all of them.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import environment
import executed_worker
import torch
from faults import Case, Fault, beyond, edited
from harness import expected_logits, neuron_config, plain_model, sequences

from kimi_k2.sharding import early_qkv_a as weights
from kimi_k2.sharding import whole

early, experts = environment.contrib("early_qkv_a"), environment.contrib("experts")
P, F, M, E = early.EarlyProjections, early.Following, early.KimiK2MoE, experts.KimiK2ExpertMLPs
CHOSEN, ALL = "early projections TP2", "early projections EP2, all experts"
CASES = {CHOSEN: (2, 1, 1), ALL: (1, 2, 4)}
FAULTS: dict[str, Fault] = {
    "every rank takes the first columns of the residual": (CHOSEN, lambda: edited(
        P, "of_residual", "index_select(2, rank)", "index_select(2, 0 * rank)")),
    "residual left out behind experts": (CHOSEN, lambda: edited(
        F, "part_with", "weights.of_residual(residual, self.rank) + experts", "experts")),
    "experts left out": (CHOSEN, lambda: edited(F, "part_with", "+ experts", "")),
    "residual left out behind the dense MLP": (CHOSEN, lambda: edited(
        F, "part", "weights.of_residual(residual, self.rank) + weights", "weights")),
    "dense MLP left out": (CHOSEN, lambda: edited(F, "part", "+ weights.of_values(values)", "")),
    "shared expert left out": (CHOSEN, lambda: edited(
        E, "_with_early_shared", "columns + over_experts(inner, beside.weight)", "columns")),
    "shared expert's output left out": (CHOSEN, lambda: edited(
        E, "_with_early_shared", "out + self.shared_experts.down(inner).squeeze(0)", "out")),
    "router's weights not applied": (CHOSEN, lambda: edited(
        E, "forward_early", "* weights.unsqueeze(-1)).flatten(1)", ").flatten(1)")),
    "every choice takes the first expert": (CHOSEN, lambda: edited(
        E, "forward_early", "op.early_qkv_a.chosen(chosen)", "op.early_qkv_a.chosen(0 * chosen)")),
    "the norm's scalar is left out": (CHOSEN, lambda: edited(F, "take", "* torch.rsqrt(squares + eps)", "")),
    "gamma is not folded": (CHOSEN, lambda: edited(whole, "scaled_projections", ".mul_(gamma)", "")),
    "the layer's own projections are folded": (CHOSEN, lambda: edited(
        whole, "whole_state_dict", "layer + 1", "layer")),
    "down_proj is not folded": (CHOSEN, lambda: edited(weights, "fold", "down.T", "torch.ones_like(down).T")),
    "each rank goes on with its own summand": (CHOSEN, lambda: edited(
        M, "forward", "both = reduce_from_tensor_model_parallel_region(both, process_group=group)",
        "output = reduce_from_tensor_model_parallel_region(output, process_group=group);"
        "both = torch.cat((output, following.part_with(columns, values)), dim=2)")),
    "summed in BF16": (CHOSEN, lambda: edited(
        M, "forward", "both = torch.cat((output, following.part_with(columns, values)), dim=2)",
        "both = torch.cat((output, following.part_with(columns, values)), dim=2).to(torch.bfloat16)")),
    "every rank weighs the first ranks' experts": (ALL, lambda: edited(
        E, "local_affinities", "expert_affinities.index_select(1, local.to(torch.long))",
        "expert_affinities[:, : self.num_local_experts]")),
    "router's weights not applied to all experts": (ALL, lambda: edited(
        E, "forward_early", "inner = inner.to(torch.float32) * weights.T.unsqueeze(-1)",
        "inner = inner.to(torch.float32)")),
    "the sum over one group's ranks alone": (ALL, lambda: edited(
        M, "forward", "parallel_state.get_world_group() if self.ep_enabled else self.tensor_parallel_group",
        "self.expert_mlps.moe_tensor_model_parallel_group")),
}  # fmt: skip


def seen_by(name: str, job: dict[str, Any], expected: torch.Tensor) -> list[str]:
    """Names of the checks that fail now."""
    app = executed_worker.build(copy.deepcopy(job))
    executed_worker.load(app)
    (logits,) = executed_worker.results(app, job["cases"])
    return beyond(name, logits, expected)


def cases(checkpoint: Path) -> dict[str, Case]:
    """One a layout."""
    model = plain_model(checkpoint)
    made: dict[str, Case] = {}
    for name, (tp, ep, batch) in CASES.items():
        case = sequences(batch, 512, steps=3)
        options = neuron_config(tp, ep, batch, torch_dtype="float32", decode="kernels", seq_len=256)
        options["blockwise_matmul_config"]["parallelize_token_to_block_mapping"] = True
        job = {"checkpoint": str(checkpoint), "neuron_config": options, "cases": [case]}
        made[name] = partial(seen_by, name, job, expected_logits(model, case))
    return made
