"""Faults in the class as a whole: routing, attention, experts, what stays float32.

`parity`: logits of executed float32 graphs on two ranks differ from the plain model's by more than 2e-5; the check of
test_executed_layouts and test_modes. `dtypes`: the BF16 module or graph breaks the contract of test_deployed_fp8.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import environment
import executed_worker
import torch
from faults import Case, Fault, beyond, edited
from harness import expected_logits, neuron_config, plain_model, sequences
from steps import run

attention, router, experts, modeling = (
    environment.contrib(name) for name in ("attention", "router", "experts", "modeling_kimi_k2")
)
A, R, E = attention.KimiK2Attention, router.KimiK2Router, experts.KimiK2ExpertMLPs
# Ranks share the map of tokens to blocks within tensor parallelism only.
EXPERT, TENSOR = "EP2", "TP2"
FAULTS: dict[str, Fault] = {
    "inv_freq is a buffer": (EXPERT, lambda: edited(
        A, "__init__", "self.inv_freq: list[float] = rope_inv_freq(hf, \"cpu\").tolist()",
        "self.register_buffer('inv_freq', rope_inv_freq(hf, 'cpu'), persistent=False)")),
    "router bias is cast": (EXPERT, lambda: edited(R, "_apply", "moved.data = kept.to(moved.device)", "pass")),
    "router bias ignored": (EXPERT, lambda: edited(R, "forward", "else scores + bias", "else scores")),
    "router weighs by the biased scores": (EXPERT, lambda: edited(
        R, "forward", "weights = scores.gather", "weights = choice.gather")),
    "bias before the sigmoid": (EXPERT, lambda: edited(R, "forward", "self.bias_before_sigmoid", "True")),
    "no scaling factor": (EXPERT, lambda: edited(
        R, "forward", "weights * self.routed_scaling_factor", "weights * 1.0")),
    "no normalisation": (EXPERT, lambda: edited(R, "forward", "if self.norm_topk_prob:", "if False:")),
    "router logits in the model's dtype": (EXPERT, lambda: edited(
        R, "get_router_logits",
        "return dot_float32(tokens, self.linear_router.weight, ([1], [0 if self.transposed else 1]), ([], []))",
        "return torch.nn.functional.linear(tokens, self.linear_router.weight).float()")),
    "one expert fewer": (EXPERT, lambda: edited(R, "forward", "self.top_k, dim=1", "self.top_k - 1, dim=1")),
    "EP offset ignored": (EXPERT, lambda: edited(
        E, "local_slots", "self.get_spmd_rank().get_local_expert_indices()",
        "(self.get_spmd_rank().get_local_expert_indices() % self.num_local_experts)")),
    "other ranks' experts not masked": (EXPERT, lambda: edited(
        E, "local_slots", "weights * match.any(dim=-1).to(weights.dtype)", "weights")),
    "token map cut by a view": (TENSOR, lambda: edited(
        E, "torch_blockwise_matmul_inference", "token_position_to_id.to(torch.long)",
        "token_position_to_id.view(num_blocks, block_size).flatten().to(torch.long)")),
    "every choice takes the first row of the blocks": (EXPERT, lambda: edited(
        E, "torch_blockwise_matmul_inference", "part[rows[:, choice]]", "part[0 * rows[:, choice]]")),
    "expert weights not applied at prefill": (EXPERT, lambda: edited(
        E, "torch_blockwise_matmul_inference", "* weights[:, choice, None]", "")),
    "softmax scale without mscale": (EXPERT, lambda: edited(A, "forward", "hf.softmax_scale", "hf.qk_head_dim**-0.5")),
    "rotation halves swapped": (EXPERT, lambda: edited(A, "rotation", "return (angles.cos()", "return (angles.sin()")),
    "key not rotated": (EXPERT, lambda: edited(
        A, "forward", "k_rope = apply_rotary_interleaved(k_rope, cos_cache, sin_cache)", "pass")),
    "query not rotated": (EXPERT, lambda: edited(
        A, "forward", "q_rope = apply_rotary_interleaved(q_rope, cos_cache.unsqueeze(2), sin_cache.unsqueeze(2))",
        "pass")),
    "latent not normed": (EXPERT, lambda: edited(A, "forward", "latent = self.kv_a_layernorm(latent)", "pass")),
    "query latent not normed": (EXPERT, lambda: edited(
        A, "forward", "self.q_a_layernorm(q_down)", "q_down")),
    "no causal mask": (EXPERT, lambda: edited(
        A, "forward", "weights = self._masked(present, attention_mask).softmax", "weights = present.softmax")),
    "cache not masked": (EXPERT, lambda: edited(
        A, "forward", "prior = self._masked(scores(keys, latents), attention_mask)", "prior = scores(keys, latents)")),
    "own token left out": (EXPERT, lambda: edited(A, "forward", "torch.cat((prior, present), dim=-1)",
        "torch.cat((prior, present - 1e9), dim=-1)")),
    "latent and key caches swapped by a position": (EXPERT, lambda: edited(
        A, "_entries", "return k_rope.unsqueeze(1), latent.unsqueeze(1)",
        "return k_rope.roll(1, -1).unsqueeze(1), latent.unsqueeze(1)")),
    "shared expert left out": (EXPERT, lambda: edited(
        modeling, "make_moe", "shared_experts=shared", "shared_experts=None")),
    "residual left out": (EXPERT, lambda: edited(
        modeling.KimiK2DecoderLayer, "forward", "hidden_states = residual + hidden_states", "pass")),
}  # fmt: skip


def seen_by(checkpoint: str, case: dict[str, Any], expected: torch.Tensor, tp: int, ep: int) -> list[str]:
    """Names of the checks that fail now."""
    seen = []
    options = neuron_config(tp, ep, 1, torch_dtype="bfloat16")
    app = executed_worker.build({"checkpoint": checkpoint, "neuron_config": options})
    kinds = executed_worker.loaded_types(app)
    lowering = environment.contrib("lowering")
    graph = lowering.lower(app, lowering.STAGES[1])
    wrong = [
        name for name, kind in kinds.items() if (kind == "torch.float32") != name.endswith("bias") or "inv_freq" in name
    ]
    if wrong or len(re.findall(r"= f32\[1,16\]\S* dot\(", graph.hlo)) != 1:
        seen.append("dtypes")
    options = neuron_config(tp, ep, 1, torch_dtype="float32")
    options["blockwise_matmul_config"]["parallelize_token_to_block_mapping"] = True
    app = executed_worker.build({"checkpoint": checkpoint, "neuron_config": options})
    executed_worker.load(app)
    return seen + beyond("parity", run(app, case["prompts"], case["forced"]), expected)


def cases(checkpoint: Path) -> dict[str, Case]:
    """The checks by layout."""
    case = sequences(1, 512, steps=3)
    expected = expected_logits(plain_model(checkpoint), case)
    given = (str(checkpoint), case, expected)
    return {EXPERT: partial(seen_by, *given, 1, 2), TENSOR: partial(seen_by, *given, 2, 1)}
