"""Counts of the decode step's kernels, stored for `kimi-k2 plan`: `python -m kimi_k2.nki.step_counts` makes them anew.

The kernels run on the emulator at the sizes of one rank, routed experts in FP8 with scales of 128 x 128. Modelled, not
measured.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kimi_k2.config import KimiK2Config
from kimi_k2.nki import step_sizes as sizes
from kimi_k2.nki.step import Layers, at, described
from kimi_k2.nki.step_sizes import FP8, RANKS, ExpertShape, Form
from nki_emulator.dtypes import NUMPY
from nki_emulator.install import install
from nki_emulator.rates import TRAINIUM2

FILE = Path(__file__).with_name("step_counts.json")
SCHEMA = "kimi-k2/nki-step/4"
# TP32/EP2: of a token's 8 experts a rank has 4 on average; the slowest has 5 (5.1 expected of uniform routing), and 18
# of the 32 of 4 tokens (18.2).
_LOCAL = {1: (5,), 4: (5, 4, 5, 4)}
PRESETS = ("trn2-tp64-ep1", "trn2-tp32-ep2")
# Cache slots, and the ranks that share them.
CONTEXTS = {4096: 1, 131072: 16}
EFFICIENCIES, LATENCIES = (50, 70, 80, 90), (5, 10, 15, 20, 30)
FORMS = {
    "folded": Form(), "folded_fp8": Form(attention=FP8), "folded_4": Form(tokens=4),
    "apart": Form(apart=True), "apart_4": Form(tokens=4, apart=True),
}  # fmt: skip
PAGE = 32  # slots
LAYERS = 4  # that the whole-layer kernel is run with
SCALE, SCALING, EPS = 0.1447, 2.827, 1e-6
CONFIG = KimiK2Config.from_preset("kimi-k2-instruct-0905")
EXPERTS, ROPE, DOWNS = CONFIG.n_routed_experts, CONFIG.qk_rope_head_dim, CONFIG.qkv_a_dim
ATTENDED = "all-reduce of the attention's output and the router's logits"
MOVED = "all-reduce of the experts' output and the next down projections"


def expert_shape(preset: str, form: Form) -> ExpertShape:
    """Of a preset's layout, for as many tokens as a form has."""
    if preset == "trn2-tp64-ep1":
        return ExpertShape(32, (8,) * form.tokens, False)
    return ExpertShape(64, _LOCAL[form.tokens], True)


def whole_layers(slots: int, ranks: int, shape: ExpertShape, form: Form) -> Layers:
    """The whole-layer kernel of a sequence's tokens, on rank 0 of 64: what others bring is left out of its sums."""
    from kimi_k2.nki.kernels.layers import decode_layers, layer_of

    kernel, mine = decode_layers[2], slots // ranks
    following = _layer(mine, ranks, shape, form)
    last = {name: tensor for name, tensor in following.items() if not name.startswith("next_")}
    layers = tuple(layer_of(tensors) for tensors in (*[following] * (LAYERS - 1), last))
    group = {} if ranks == 1 else {"cache_groups": ((0,),), "own": torch.ones(1, 1, dtype=torch.int32)}
    kernel(layers=layers, **group, **_step(mine, shape, form))
    exchange = () if ranks == 1 else ("all-to-all of the group's sums",)
    return Layers(kernel, (*exchange, ATTENDED, MOVED))


def layer_apart(slots: int, shape: ExpertShape, form: Form) -> Layers:
    """The kernel of one layer over pages, on rank 0 of 64; a page of 32 slots has four runs of 8."""
    from kimi_k2.nki.kernels.layers import decode_layer

    kernel, each = decode_layer[2], 8
    pages = torch.zeros(slots // PAGE, 1, PAGE, CONFIG.cache_dim // 2, dtype=torch.bfloat16)
    layer = {**_layer(slots, 1, shape, form), "latents": pages, "keys": pages}
    runs = torch.arange(slots // each, dtype=torch.int32)[None]
    kernel(runs=runs, each=each, latent_eps=EPS, **layer, **_step(slots, shape, form))
    return Layers(kernel, (ATTENDED, MOVED), apart=True)


def _step(slots: int, shape: ExpertShape, form: Form) -> dict[str, Any]:
    """What both kernels are given beside layers, all slots in use."""
    return {
        "hidden": shape.hidden(), "projected": torch.zeros(form.tokens, DOWNS),
        "rotation": torch.zeros(2, ROPE, form.tokens), "lengths": torch.full((1, 1), slots, dtype=torch.int32),
        "ranks": RANKS, "groups": ((0,),), "first_expert": 0,
        "num_experts": EXPERTS if shape.others else shape.count,
        "softmax_scale": SCALE, "routed_scaling_factor": SCALING, "eps": EPS,
    }  # fmt: skip


def _layer(slots: int, ranks: int, shape: ExpertShape, form: Form) -> dict[str, Any]:
    """Zeros, but for scales and for what the router chooses by."""
    held = {
        name: (np.ones if name.endswith("_scales") else np.zeros)(size, NUMPY[str(kind)[6:].removesuffix("fn")])
        for name, (size, kind) in sizes.layer(CONFIG, shape.width, shape.count, slots, ranks, form.attention).items()
    }
    return {**held, "early_residual": shape.early_residual(EXPERTS)}


def counts() -> dict[str, Any]:
    """Everything that is stored."""
    install()
    presets: dict[str, Any] = {preset: {} for preset in PRESETS}
    for name, form in FORMS.items():
        for slots, group in CONTEXTS.items():
            # Drafts and pages are not counted over a spread cache; attention in FP8 is held for that alone.
            if ((form.tokens > 1 or form.apart) and group > 1) or (form.attention == FP8 and group == 1):
                continue
            for preset in PRESETS:
                shape = expert_shape(preset, form)
                layers = layer_apart(slots, shape, form) if form.apart else whole_layers(slots, group, shape, form)
                counted = layer_counts(layers)
                presets[preset].setdefault(name, {})[str(slots)] = counted
    return {"schema": SCHEMA, "modelled": True, "presets": presets}


def _times(seconds: Callable[[Any], float]) -> dict[str, dict[str, float]]:
    """Microseconds by DMA efficiency (percent) and latency of a collective (microseconds)."""
    return {
        str(efficiency): {
            str(latency): round(seconds(at(TRAINIUM2, efficiency, latency)) * 1e6, 2) for latency in LATENCIES
        }
        for efficiency in EFFICIENCIES
    }


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
    document: dict[str, Any] = json.loads(FILE.read_text())
    return document


def main() -> None:
    """Write the file anew, what holds no further objects or lists on a line of its own."""
    text = json.dumps(counts(), indent=1)
    FILE.write_text(re.sub(r"[{[][^][{}]*[]}]", lambda leaf: " ".join(leaf[0].split()), text) + "\n")


if __name__ == "__main__":
    main()
