"""Counts of the decode step's kernels, stored for `kimi-k2 plan`: `python -m kimi_k2.nki.step_counts` makes them anew.

The kernels run on the emulator at the sizes of one rank, routed experts in FP8 with scales of 128 x 128. Modelled, not
measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kimi_k2.nki.install import install
from kimi_k2.nki.rates import TRAINIUM2
from kimi_k2.nki.step import Stage, described, one_after_the_other, one_kernel, sbuf_bytes

FILE = Path(__file__).with_name("step_counts.json")
SCHEMA = "kimi-k2/nki-step/2"
HIDDEN, EXPERTS, TOP_K, BLOCKS = 7168, 384, 8, 56
Q_RANK, RANK, ROPE, NOPE, VALUE = 1536, 512, 64, 128, 128
# Preset: width of an expert on a rank, experts of a token that the rank holds (on average), whether others hold some.
EXPERT_SHAPES = {"trn2-tp64-ep1": (32, 8, False), "trn2-tp32-ep2": (64, 4, True)}
CONTEXTS = {4096: 1, 131072: 8}  # cache slots, and the ranks that share them
EFFICIENCIES, LATENCIES = (50, 70, 80, 90), (5, 10, 15, 20, 30)

normal = partial(torch.zeros, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Form:
    """What the kernels of a step take.

    Attributes:
        early: the router's logits ride in the all-reduce of the attention's output, and the shared expert is in FP8
            with the checkpoint's scales; else a router and a shared expert in BF16.
        fp8: attention in FP8 too.
    """

    early: bool = False
    fp8: bool = False

    def weight(self, *shape: int) -> Any:
        """Zeros of attention's type."""
        return _fp8(*shape) if self.fp8 else normal(*shape)

    def scales(self, *shape: int) -> Any:
        """Scales, where attention's weights have any."""
        return np.ones(shape, np.float32) if self.fp8 else None


def _fp8(*shape: int) -> Any:
    import ml_dtypes

    return np.zeros(shape, ml_dtypes.float8_e4m3)


FORMS = {"plain": Form(), "early": Form(early=True), "early_fp8": Form(early=True, fp8=True)}


def attention_stages(slots: int, ranks: int, form: Form) -> list[Stage]:
    """Kernels of the attention of one token, one head a rank, over `slots` cache slots shared by `ranks`."""
    from kimi_k2.nki.kernels.attention import attention_decode, attention_input
    from kimi_k2.nki.kernels.flash_decoding import attention_output, attention_queries
    from kimi_k2.nki.kernels.mla_decode import mla_decode

    columns = (Q_RANK + RANK + ROPE) // 64
    hidden, projected = normal(1, HIDDEN), normal(1, Q_RANK + RANK + ROPE)
    first = attention_input[2]
    first(hidden, normal(HIDDEN), form.weight(1, 128, BLOCKS, columns), form.scales(1, columns, 1, BLOCKS), 1e-6)
    stages = [Stage("attention_input", first, (0,), "all-reduce of the layer before")]
    gathered = "all-gather of the down projections"
    norms = normal(Q_RANK), normal(RANK)
    queries: tuple[Any, ...] = (
        form.weight(128, Q_RANK // 128, NOPE + ROPE), form.scales(128, 2, Q_RANK // 128),
        form.weight(1, NOPE, 1, RANK), form.scales(1, 128, RANK // 128, 1),
    )  # fmt: skip
    values: tuple[Any, ...] = (
        form.weight(1, 128, RANK // 128, VALUE), form.scales(1, 128, 1, RANK // 128),
        form.weight(VALUE, 1, HIDDEN), form.scales(128, BLOCKS, 1),
    )  # fmt: skip
    rotation, new = torch.zeros(2, ROPE, 1), (normal(1, RANK), normal(1, ROPE))
    own = HIDDEN // 64
    early: dict[str, Any] = {}
    if form.early:
        weights = {"early_residual": torch.zeros(own, EXPERTS), "early_heads": torch.zeros(VALUE, EXPERTS)}
        early = {"residual": normal(1, own), **weights}
    mine = slots // ranks
    cache = normal(1, mine, RANK), normal(1, mine, ROPE), torch.full((1, 1), mine, dtype=torch.int32)
    if ranks == 1:
        kernel = attention_decode[2]
        kernel(projected, *norms, *queries, *values, rotation, *cache, 0.1447, 1e-6, None, *early.values())
        return [*stages, Stage("attention_decode", kernel, (0,), gathered)]
    before, middle, behind = attention_queries[2], mla_decode[2], attention_output[2]
    before(projected, *norms, *queries, rotation, 1e-6)
    count = torch.ones(1, 1, dtype=torch.int32)
    middle(normal(1, ranks, RANK + ROPE), *cache[:2], *new, cache[2], 0.1447, count, True)
    behind(torch.zeros(ranks, 1, RANK), torch.zeros(1, ranks), *values, "bfloat16", *early.values())
    return [
        *stages,
        Stage("attention_queries", before, (0,), gathered),
        Stage("mla_decode", middle, (0, 3, 4), "all-gather of the group's queries"),
        Stage("attention_output", behind, (0, 1), "all-to-all of the group's sums"),
    ]


def moe_stage(width: int, held: int, skips: bool, form: Form) -> Stage:
    """The MoE layer of one token, of whose 8 experts the rank holds `held`."""
    from kimi_k2.nki.kernels.moe import moe_decode

    kernel = moe_decode[2]
    local = TOP_K
    gate_up, down = _fp8(local, 128, BLOCKS, 2 * width), _fp8(local, width, HIDDEN)
    scales = np.ones((local, 2, BLOCKS), np.float32), np.ones((local, BLOCKS), np.float32)
    shared: tuple[Any, ...]
    if form.early:
        shared = _fp8(128, BLOCKS, 64), np.ones((2, BLOCKS), np.float32), _fp8(32, HIDDEN), np.ones(BLOCKS, np.float32)
    else:
        shared = normal(128, BLOCKS, 64), None, normal(32, HIDDEN), None
    bias = torch.zeros(1, EXPERTS)
    bias[0, :TOP_K] = 1.0  # the choice: the first eight
    gate = None if form.early else normal(128, BLOCKS, EXPERTS)
    sums = torch.zeros(1, EXPERTS) if form.early else None
    first = TOP_K - held
    kernel(
        normal(1, HIDDEN), normal(HIDDEN), gate, bias, gate_up, scales[0], down, scales[1], *shared, first,
        EXPERTS if skips else local, 2.827, 1e-6, sums,
    )  # fmt: skip
    with_logits = " and the router's logits" if form.early else ""
    return Stage("moe_decode", kernel, (0, 16), f"all-reduce of the attention's output{with_logits}")


def counts() -> dict[str, Any]:
    """Everything that is stored."""
    install()
    presets: dict[str, Any] = {preset: {} for preset in EXPERT_SHAPES}
    for name, form in FORMS.items():
        attention = {slots: attention_stages(slots, ranks, form) for slots, ranks in CONTEXTS.items()}
        for preset, shape in EXPERT_SHAPES.items():
            moe = moe_stage(*shape, form)
            presets[preset][name] = {str(slots): layer_counts([*stages, moe]) for slots, stages in attention.items()}
    return {"schema": SCHEMA, "modelled": True, "presets": presets}


def layer_counts(stages: list[Stage]) -> dict[str, Any]:
    """Of one layer: its kernels, and its time in both forms by DMA efficiency (percent) and latency (microseconds)."""
    times: dict[str, Any] = {"kernels_in_turn": {}, "one_kernel": {}}
    for efficiency in EFFICIENCIES:
        rates = replace(TRAINIUM2, dma_bytes_a_second=TRAINIUM2.dma_bytes_a_second * efficiency / 100)
        spans = one_after_the_other(stages, rates, 0.0)
        for latency in LATENCIES:
            in_turn = times["kernels_in_turn"].setdefault(str(efficiency), {})
            in_turn[str(latency)] = round(spans * 1e6 + latency * len(stages), 2)
            together = times["one_kernel"].setdefault(str(efficiency), {})
            together[str(latency)] = round(one_kernel(stages, rates, latency * 1e-6) * 1e6, 2)
    return {"kernels": described(stages, TRAINIUM2), "sbuf_bytes": sbuf_bytes(stages), "layer_us": times}


def stored() -> dict[str, Any]:
    """What the file holds."""
    found: dict[str, Any] = json.loads(FILE.read_text())
    return found


def main() -> None:
    """Write the file anew."""
    FILE.write_text(json.dumps(counts(), indent=1) + "\n")


if __name__ == "__main__":
    main()
