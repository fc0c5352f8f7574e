"""Faults in the early router: its slices, its fold, its sum over the ranks, its dtype.

`early router`: logits of executed float32 graphs on two ranks. `dtypes`: the folded weights after NxDI's cast to BF16.
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

from kimi_k2.sharding import convert

early: Any = environment.contrib("early_router")
E, L = early.EarlyRouter, early.EarlyLogits
CASE = "early router TP2"
FAULTS: dict[str, Fault] = {
    "every rank takes the first columns of the residual": (CASE, lambda: edited(
        E, "own_columns", "index_select(2, rank)", "index_select(2, 0 * rank)")),
    "residual left out": (CASE, lambda: edited(E, "forward", "return first + second", "return second")),
    "heads left out": (CASE, lambda: edited(E, "forward", "return first + second", "return first")),
    "gamma is not folded": (CASE, lambda: edited(convert, "fold", "* gamma.to(DTYPE)", "")),
    "o_proj is not folded": (CASE, lambda: edited(convert, "fold", "weight.to(DTYPE).T", "torch.ones_like(weight).T")),
    "each rank routes by its own summand": (CASE, lambda: edited(
        early, "reduced",
        "both = reduce_from_tensor_model_parallel_region(torch.cat((own, part), dim=2), process_group=group)",
        "own = reduce_from_tensor_model_parallel_region(own, process_group=group);"
        "both = torch.cat((own, part), 2)")),
    "the norm's scalar is left out": (CASE, lambda: edited(
        L, "logits", "self.sums * torch.rsqrt(squares + self.router.eps)", "self.sums")),
    "the norm's scalar of the residual": (CASE, lambda: edited(
        L, "logits", "hidden_states.to(DTYPE).square()", "self.residual.to(DTYPE).square()")),
    "folded weights are cast": (CASE, lambda: edited(E, "_apply", "held.data = kept[name].to(held.device)", "pass")),
}  # fmt: skip


def seen_by(job: dict[str, Any], expected: torch.Tensor) -> list[str]:
    """Names of the checks that fail now."""
    options = {**job["neuron_config"], "torch_dtype": "bfloat16"}
    kinds = executed_worker.loaded_types(executed_worker.build({**job, "neuron_config": copy.deepcopy(options)}))
    held = {kind for name, kind in kinds.items() if ".early_router." in name}
    app = executed_worker.build(copy.deepcopy(job))
    executed_worker.load(app)
    (logits,) = executed_worker.results(app, job["cases"])
    return ([] if held == {"torch.float32"} else ["dtypes"]) + beyond(CASE, logits, expected)


def cases(checkpoint: Path) -> dict[str, Case]:
    """One."""
    case = sequences(1, 512, steps=3)
    options = neuron_config(2, 1, 1, torch_dtype="float32", decode="kernels", seq_len=256)
    options["blockwise_matmul_config"]["parallelize_token_to_block_mapping"] = True
    job = {"checkpoint": str(checkpoint), "neuron_config": options, "cases": [case]}
    return {CASE: partial(seen_by, job, expected_logits(plain_model(checkpoint), case))}
