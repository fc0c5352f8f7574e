"""Counts of the decode step's kernels, stored for `kimi-k2 plan`: `python -m kimi_k2.nki.step_counts` makes them anew.

The kernels run on the emulator at the sizes of one rank, routed experts in FP8 with scales of 128 x 128. Modelled, not
measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kimi_k2.nki import step_sizes as sizes
from kimi_k2.nki.install import install
from kimi_k2.nki.rates import TRAINIUM2
from kimi_k2.nki.step import Layers, Stage, at, described
from kimi_k2.nki.step_sizes import BLOCKS, DOWNS, EXPERTS, HIDDEN, RANK, RANKS, ROPE, ExpertShape, Form

FILE = Path(__file__).with_name("step_counts.json")
SCHEMA = "kimi-k2/nki-step/3"
# TP32/EP2: of a token's 8 experts a rank has 4 on average; the slowest core of all adds up about 3 of its 4 slots.
EXPERT_SHAPES = {
    "trn2-tp64-ep1": ExpertShape(32, tuple(range(8)), False),
    "trn2-tp32-ep2": ExpertShape(64, (0, 1, 2, 4, 5, 6), True),
}
# Cache slots, and the ranks that share them: of the class's kernels, and of the whole-layer kernel.
CONTEXTS = {4096: (1, 1), 131072: (8, 16)}
EFFICIENCIES, LATENCIES = (50, 70, 80, 90), (5, 10, 15, 20, 30)
# Of the 8 slots, those that the kernels by themselves count at TP32/EP2.
_AVERAGE = (4, 5, 6, 7)
FORMS = {
    "plain": Form(),
    "early": Form(early_router=True),
    "folded_kernels": Form(early_router=True, early_qkv_a=True),
    "folded": Form(early_router=True, early_qkv_a=True),
    "folded_fp8": Form(early_router=True, early_qkv_a=True, attention="fp8"),
}
IN_TURN = ("plain", "early", "folded_kernels")
LAYERS = 4  # that the whole-layer kernel is run with
SCALE, SCALING, EPS = 0.1447, 2.827, 1e-6


def attention_stages(slots: int, ranks: int, form: Form) -> list[Stage]:
    """Kernels of the attention of one token, one head a rank, over `slots` cache slots shared by `ranks`."""
    from kimi_k2.nki.kernels.attention import attention_decode, attention_input
    from kimi_k2.nki.kernels.flash_decoding import attention_output, attention_queries
    from kimi_k2.nki.kernels.mla_decode import mla_decode

    columns = DOWNS // RANKS
    hidden, projected = sizes.bfloat16((1, HIDDEN)), sizes.bfloat16((1, DOWNS))
    first = attention_input[2]
    first(hidden, sizes.bfloat16(HIDDEN), form.weight(1, 128, BLOCKS, columns), form.scales(1, columns, 1, BLOCKS), EPS)
    stages = [Stage("attention_input", first, "all-reduce of the layer before")]
    gathered = "all-gather of the down projections"
    norms, queries, values = sizes.norms(), sizes.queries(form), sizes.values(form)
    rotation, new = torch.zeros(2, ROPE, 1), (sizes.bfloat16((1, RANK)), sizes.bfloat16((1, ROPE)))
    early: tuple[Any, ...] = ()
    if form.early_router:
        early = (sizes.bfloat16((1, sizes.OWN)), *sizes.early_router())
    mine = slots // ranks
    cache = (*sizes.cache(mine), sizes.lengths(mine))
    if ranks == 1:
        kernel = attention_decode[2]
        kernel(projected, *norms, *queries, *values, rotation, *cache, SCALE, EPS, None, *early)
        return [*stages, Stage("attention_decode", kernel, gathered)]
    before, middle, behind = attention_queries[2], mla_decode[2], attention_output[2]
    before(projected, *norms, *queries, rotation, EPS)
    count = torch.ones(1, 1, dtype=torch.int32)
    middle(sizes.bfloat16((1, ranks, RANK + ROPE)), *cache[:2], *new, cache[2], SCALE, count, True)
    behind(torch.zeros(ranks, 1, RANK), torch.zeros(1, ranks), *values, "bfloat16", *early)
    return [
        *stages,
        Stage("attention_queries", before, gathered),
        Stage("mla_decode", middle, "all-gather of the group's queries"),
        Stage("attention_output", behind, "all-to-all of the group's sums"),
    ]


def moe_stage(shape: ExpertShape, form: Form) -> Stage:
    """The MoE layer of one token."""
    from kimi_k2.nki.kernels.moe import moe_decode

    kernel = moe_decode[2]
    if shape.others:
        shape = ExpertShape(shape.width, _AVERAGE, True)
    gate = None if form.early_router else sizes.bfloat16((128, BLOCKS, EXPERTS))
    sums = torch.zeros(1, EXPERTS) if form.early_router else None
    kernel(
        sizes.bfloat16((1, HIDDEN)), sizes.bfloat16(HIDDEN), gate, shape.bias(), *sizes.routed(shape),
        *sizes.shared(form), 0, EXPERTS if shape.others else shape.count, SCALING, EPS, sums,
    )  # fmt: skip
    with_logits = " and the router's logits" if form.early_router else ""
    return Stage("moe_decode", kernel, f"all-reduce of the attention's output{with_logits}")


def folded_stages(slots: int, shape: ExpertShape, form: Form) -> list[Stage]:
    """Kernels of a layer as the class calls them with early sums and tiles, between operations of XLA."""
    from kimi_k2.nki.kernels.experts import selective_experts
    from kimi_k2.nki.kernels.router import noaux_tc_choice

    attention = attention_stages(slots, 1, form)[-1].kernel
    if shape.others:
        shape = ExpertShape(shape.width, _AVERAGE, True)
    choice, experts = noaux_tc_choice[2], selective_experts[2]
    choice(torch.zeros(1, EXPERTS), shape.bias(), SCALING)
    experts(
        sizes.bfloat16((1, HIDDEN)), *sizes.routed(shape), shape.index(), sizes.ones((1, sizes.TOP_K)), 0,
        EXPERTS if shape.others else shape.count, *sizes.shared(form),
        sizes.bfloat16((shape.count, shape.width, DOWNS)), sizes.bfloat16((sizes.SHARED, DOWNS)),
    )  # fmt: skip
    return [
        Stage("attention_decode", attention, "all-reduce of the experts' output and the next down projections"),
        Stage("noaux_tc_choice", choice, "all-reduce of the attention's output and the router's logits"),
        Stage("selective_experts", experts, ""),
    ]


def whole_layers(slots: int, ranks: int, shape: ExpertShape, form: Form) -> Layers:
    """The whole-layer kernel of one token, on rank 0 of 64: what others bring is left out of its sums."""
    from kimi_k2.nki.kernels.layers import decode_layers

    kernel = decode_layers[2]
    mine = slots // ranks
    layers = [_layer(mine, ranks, shape, form, last=number == LAYERS - 1) for number in range(LAYERS)]
    group = () if ranks == 1 else ([[0]], torch.ones(1, 1, dtype=torch.int32))
    kernel(
        sizes.float32((1, HIDDEN)), sizes.float32((1, DOWNS)), layers, torch.zeros(2, ROPE, 1), sizes.lengths(mine),
        RANKS, [[0]], 0, EXPERTS if shape.others else shape.count, SCALE, SCALING, EPS, *group,
    )  # fmt: skip
    exchange = () if ranks == 1 else ("all-to-all of the group's sums",)
    attended = "all-reduce of the attention's output and the router's logits"
    moved = "all-reduce of the experts' output and the next down projections"
    return Layers(kernel, (*exchange, attended, moved))


def _layer(slots: int, ranks: int, shape: ExpertShape, form: Form, last: bool) -> Any:
    from kimi_k2.nki.kernels.layer_attention import Layer

    q_b, q_b_scales, w_uk, w_uk_scales = sizes.queries(form)
    if ranks > 1:  # of the whole group's heads, one half on each core
        each = ranks // 2
        q_b, w_uk = (np.stack([part] * 2) for part in (np.tile(q_b, (1, 1, each)), np.tile(w_uk, (each, 1, 1, 1))))
        if q_b_scales is not None:
            rows = -(-each * ROPE // 128) + each
            q_b_scales = sizes.ones((2, 128, rows, q_b_scales.shape[2]))
            w_uk_scales = np.stack([np.tile(w_uk_scales, (each, 1, 1, 1))] * 2)
    following: tuple[Any, ...] = (None, None, None)
    if not last:
        following = (
            sizes.bfloat16((sizes.OWN, DOWNS)), sizes.bfloat16((shape.count, shape.width, DOWNS)),
            sizes.bfloat16((sizes.SHARED, DOWNS)),
        )  # fmt: skip
    parts = [
        *sizes.norms(), q_b, q_b_scales, w_uk, w_uk_scales, *sizes.values(form), *sizes.early_router(),
        *sizes.cache(slots), sizes.bfloat16(HIDDEN), shape.bias(), *sizes.routed(shape), *sizes.shared(form),
    ]  # fmt: skip
    return Layer._make([*parts, *following])


def counts() -> dict[str, Any]:
    """Everything that is stored."""
    install()
    presets: dict[str, Any] = {preset: {} for preset in EXPERT_SHAPES}
    for name, form in FORMS.items():
        for slots, (ranks, group) in CONTEXTS.items():
            if name == "folded_kernels" and ranks > 1:  # the class's flash decoding has no kernels by themselves
                continue
            attention = attention_stages(slots, ranks, form) if name in IN_TURN else []
            for preset, shape in EXPERT_SHAPES.items():
                if name == "folded_kernels":
                    found = kernel_counts(folded_stages(slots, shape, form))
                elif name in IN_TURN:
                    found = kernel_counts([*attention, moe_stage(shape, form)])
                else:
                    found = layer_counts(whole_layers(slots, group, shape, form))
                presets[preset].setdefault(name, {})[str(slots)] = found
    return {"schema": SCHEMA, "modelled": True, "presets": presets}


def _times(seconds: Callable[[Any], float]) -> dict[str, dict[str, float]]:
    """Microseconds by DMA efficiency (percent) and latency of a collective (microseconds)."""
    return {
        str(efficiency): {
            str(latency): round(seconds(at(TRAINIUM2, efficiency, latency)) * 1e6, 2) for latency in LATENCIES
        }
        for efficiency in EFFICIENCIES
    }


def kernel_counts(stages: list[Stage]) -> dict[str, Any]:
    """Of one layer: its kernels, and its time where each is launched by itself."""
    kernels = [
        {
            "kernel": stage.name,
            "collective_before": stage.collective,
            **described(stage.cost(TRAINIUM2)),
            "span_us": round(stage.cost(TRAINIUM2).span * 1e6, 3),
        }
        for stage in stages
    ]
    spans = {
        efficiency: sum(stage.cost(at(TRAINIUM2, efficiency, 0)).span for stage in stages)
        for efficiency in EFFICIENCIES
    }
    collectives = sum(bool(stage.collective) for stage in stages)
    times = {
        str(efficiency): {str(latency): round(span * 1e6 + latency * collectives, 2) for latency in LATENCIES}
        for efficiency, span in spans.items()
    }
    return {"collectives": collectives, "kernels": kernels, "layer_us": times}


def layer_counts(layers: Layers) -> dict[str, Any]:
    """Of one layer in the whole-layer kernel: counts, SBUF, what its time goes to, and its time."""
    here = at(TRAINIUM2, 80, 15)
    return {
        "collectives": len(layers.collectives),
        "collectives_in_order": list(layers.collectives),
        **described(layers.counts(TRAINIUM2)),
        "sbuf_bytes": layers.sbuf_bytes(),
        "stages_us": [round(time * 1e6, 2) for time in layers.stages(here)],
        "path_us": {name: round(time * 1e6, 2) for name, time in sorted(layers.path(here).items())},
        "layer_us": _times(layers.seconds),
    }


def stored() -> dict[str, Any]:
    """What the file holds."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def main() -> None:
    """Write the file anew."""
    FILE.write_text(json.dumps(counts(), indent=1) + "\n")


if __name__ == "__main__":
    main()
