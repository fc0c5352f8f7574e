"""Faults put into the NxDI class one at a time, and the check that sees each.

python mutations_worker.py CHECKPOINT OUTPUT [NAME...]

`parity`: logits of executed float32 graphs on two ranks differ from the plain model's by more than
2e-5, or nothing runs; the check of test_executed_layouts and test_modes. `dtypes`: the BF16 module or graph breaks the
contract of test_deployed_fp8.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import environment
import executed_worker
import torch
from harness import expected_logits, neuron_config, plain_model, sequences
from steps import run

attention, router, experts, modeling, kv_cache = (
    environment.contrib(name) for name in ("attention", "router", "experts", "modeling_kimi_k2", "kv_cache")
)
Patch = tuple[Any, str, Any]


def edited(owner: Any, method: str, old: str, new: str) -> Patch:
    """A method with a piece of its source replaced."""
    import inspect
    import textwrap

    function = inspect.unwrap(getattr(owner, method))
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) >= 1, f"{method} no longer contains {old!r}"
    space: dict[str, Any] = {}
    if "super()" in source:
        source = source.replace("super()", "super(_owner, self)")
    exec(compile(source.replace(old, new), f"<{method}>", "exec"), {**function.__globals__, "_owner": owner}, space)
    made = space[method]
    return owner, method, staticmethod(made) if isinstance(owner.__dict__.get(method), staticmethod) else made


A, R, E = attention.KimiK2Attention, router.KimiK2Router, experts.KimiK2ExpertMLPs
MUTATIONS: dict[str, Callable[[], Patch]] = {
    "inv_freq is a buffer": lambda: edited(
        A, "__init__", "self.inv_freq: list[float] = rope_inv_freq(hf, \"cpu\").tolist()",
        "self.register_buffer('inv_freq', rope_inv_freq(hf, 'cpu'), persistent=False)"),
    "router bias is cast": lambda: edited(R, "_apply", "moved.data = kept.to(moved.device)", "pass"),
    "router bias ignored": lambda: edited(R, "forward", "choice = scores + bias", "choice = scores"),
    "router weighs by the biased scores": lambda: edited(
        R, "forward", "weights = scores.gather", "weights = choice.gather"),
    "bias before the sigmoid": lambda: edited(R, "forward", "if self.bias_before_sigmoid:", "if True:"),
    "no scaling factor": lambda: edited(R, "forward", "weights * self.routed_scaling_factor", "weights * 1.0"),
    "no normalisation": lambda: edited(R, "forward", "if self.norm_topk_prob:", "if False:"),
    "router logits in the model's dtype": lambda: edited(
        R, "get_router_logits", "return dot_float32(tokens, self.linear_router.weight, ([1], [1]), ([], []))",
        "return torch.nn.functional.linear(tokens, self.linear_router.weight).float()"),
    "one expert fewer": lambda: edited(R, "forward", "self.top_k, dim=1", "self.top_k - 1, dim=1"),
    "EP offset ignored at decode": lambda: edited(
        E, "forward_selective", "self.get_spmd_rank().get_local_expert_indices()",
        "(self.get_spmd_rank().get_local_expert_indices() % self.num_local_experts)"),
    "other ranks' experts not masked": lambda: edited(
        E, "forward_selective", "weights * match.any(dim=-1).to(weights.dtype)", "weights"),
    "token map cut by a view": lambda: edited(
        E, "torch_blockwise_matmul_inference", "token_position_to_id.to(torch.long)",
        "token_position_to_id.view(num_blocks, block_size)"),
    "blocks all written to one row": lambda: edited(
        E, "torch_blockwise_matmul_inference", "index_add(0, rows.flatten()", "index_add(0, 0 * rows.flatten()"),
    "expert weights not applied at prefill": lambda: edited(
        E, "torch_blockwise_matmul_inference", "* weights[rows, experts.unsqueeze(1)].unsqueeze(-1)", ""),
    "softmax scale without mscale": lambda: edited(A, "forward", "hf.softmax_scale", "hf.qk_head_dim**-0.5"),
    "rotation halves swapped": lambda: edited(A, "rotation", "return (angles.cos()", "return (angles.sin()"),
    "key not rotated": lambda: edited(
        A, "forward", "k_rope = apply_rotary_interleaved(k_rope, cos_cache, sin_cache)", "pass"),
    "query not rotated": lambda: edited(
        A, "forward", "q_rope = apply_rotary_interleaved(q_rope, cos_cache.unsqueeze(2), sin_cache.unsqueeze(2))",
        "pass"),
    "latent not normed": lambda: edited(A, "forward", "latent = self.kv_a_layernorm(latent)", "pass"),
    "query latent not normed": lambda: edited(A, "forward", "self.q_b_proj(self.q_a_layernorm(q_down))",
        "self.q_b_proj(q_down)"),
    "no causal mask": lambda: edited(
        A, "forward", "weights = self._masked(own, attention_mask).softmax", "weights = own.softmax"),
    "cache not masked": lambda: edited(
        A, "forward", "prior = self._masked(scores(keys, latents), attention_mask)", "prior = scores(keys, latents)"),
    "own token left out": lambda: edited(A, "forward", "torch.cat((prior, own), dim=-1).softmax",
        "torch.cat((prior, own - 1e9), dim=-1).softmax"),
    "latent and key caches swapped by a position": lambda: edited(
        A, "forward", "return out, (k_rope.unsqueeze(1), latent.unsqueeze(1))",
        "return out, (k_rope.roll(1, -1).unsqueeze(1), latent.unsqueeze(1))"),
    "shared expert left out": lambda: edited(
        modeling, "make_moe", "shared_experts=shared", "shared_experts=None"),
    "residual left out": lambda: edited(
        modeling.KimiK2DecoderLayer, "forward", "hidden_states = residual + hidden_states", "pass"),
}  # fmt: skip

TENSOR_PARALLEL = ("token map cut by a view",)  # ranks share the map within tensor parallelism only


@torch.inference_mode()
def seen_by(
    checkpoint: str, case: dict[str, Any], expected: torch.Tensor, layout: tuple[int, int] = (1, 2)
) -> list[str]:
    """Names of the checks that fail now; `layout` is tensor and expert parallelism."""
    seen = []
    try:
        options = neuron_config(*layout, 1, torch_dtype="bfloat16")
        app = executed_worker.build({"checkpoint": checkpoint, "neuron_config": options})
        kinds = executed_worker.loaded_types(app)
        lowering = environment.contrib("lowering")
        graph = lowering.lower(app, lowering.STAGES[1])
        wrong = [
            name
            for name, kind in kinds.items()
            if (kind == "torch.float32") != name.endswith("bias") or "inv_freq" in name
        ]
        if wrong or len(re.findall(r"= f32\[1,16\]\S* dot\(", graph.hlo)) != 1:
            seen.append("dtypes")
        options = neuron_config(*layout, 1, torch_dtype="float32")
        options["blockwise_matmul_config"]["parallelize_token_to_block_mapping"] = True
        app = executed_worker.build({"checkpoint": checkpoint, "neuron_config": options})
        executed_worker.load(app)
        difference = float((run(app, case["prompts"], case["forced"]) - expected).abs().max())
        if not difference <= 2e-5:
            seen.append(f"parity ({difference:.1e})")
    except Exception as error:  # a fault that stops the run is seen, too
        seen.append(f"parity ({type(error).__name__})")
    return seen


def main() -> None:
    checkpoint, output, *names = sys.argv[1:]
    case = sequences(1, 512, steps=3)
    expected = expected_logits(plain_model(Path(checkpoint)), case)
    table = {"none": seen_by(checkpoint, case, expected)}
    for name in names or MUTATIONS:
        owner, attribute, made = MUTATIONS[name]()
        with mock.patch.object(owner, attribute, made):
            layout = (2, 1) if name in TENSOR_PARALLEL else (1, 2)
            table[name] = seen_by(checkpoint, case, expected, layout)
        print(name, table[name], flush=True)
        torch.save(table, output)


if __name__ == "__main__":
    main()
