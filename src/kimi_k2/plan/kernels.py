"""A decode step on our NKI kernels: stored counts of one layer, collectives, and the rest of the step. Modelled.

The counts come from the emulator (`python -m kimi_k2.nki.step_counts`); a test holds them to the kernels.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from kimi_k2.config import KimiK2Config
from kimi_k2.nki.rates import TRAINIUM2
from kimi_k2.nki.step_counts import EFFICIENCIES, HIDDEN, LATENCIES, stored
from kimi_k2.plan.memory import local_bytes
from kimi_k2.plan.target import Target
from kimi_k2.sharding.planned import ShardingPlan

ASSUMED_EFFICIENCY, ASSUMED_LATENCY = 80, 15  # percent of the DMA engines' peak; microseconds of a collective
_OTHER_COLLECTIVES = 3  # of the embedding, and of sampling
_CORES = 2
ASSUMPTIONS = (
    "modelled, not measured; nothing here has run on Trainium",
    "engines by published rates, in the kernels' order, without semaphores; launches are not counted",
    f"DMA at {ASSUMED_EFFICIENCY} % of 368 GB/s a core, 512 bytes' worth a descriptor, 1.3 us from trigger to data",
    f"a collective takes {ASSUMED_LATENCY} us, whatever its size; both cores of LNC=2 arrive together",
    "one kernel a layer: prologues run during the collectives, DMA at most two stages ahead; needs collectives in NKI",
    "routed experts in FP8 with scales of 128 x 128; residual sums not counted",
    "131,072 tokens: the cache over groups of 8 ranks; of 8 experts a rank of EP2 holds 4",
    "the dense layer's MLP and the head by their bytes alone; the dense layer's attention as another layer's",
)

_FORMS = {
    "plain": "attention, shared expert and router in BF16",
    "early": "attention in BF16, shared expert in FP8; the router's logits ride in attention's all-reduce, in float32",
}


def kernel_step(config: KimiK2Config, target: Target, plan: ShardingPlan) -> dict[str, Any] | None:
    """Times of one token, by context; None for a deployment whose kernels were not counted.

    Seconds are modelled: `tpot` at the assumed DMA efficiency and latency, `sensitivity` over both.
    """
    layout = target.layout
    name = {(64, 1): "trn2-tp64-ep1", (32, 2): "trn2-tp32-ep2"}.get((layout.moe_tp, layout.moe_ep))
    forms = stored()["presets"].get(name or "")
    same = config.hidden_size == HIDDEN and layout.ranks == 64 and target.batch == 1 and target.is_neuron
    if forms is None or not same:
        return None
    form = "early" if layout.early_router else "plain"
    other_bytes = sum(local_bytes(tensor) for tensor in plan.tensors if _other(tensor.name))
    return {
        "assumptions": [*ASSUMPTIONS, _FORMS[form]],
        "form": form,
        "other_bytes": other_bytes,
        "contexts": {
            slots: _context(layer, config.num_hidden_layers, other_bytes) for slots, layer in forms[form].items()
        },
    }


def _other(name: str) -> bool:
    return name.startswith(("lm_head.", "layers.0.mlp."))


def _context(layer: dict[str, Any], layers: int, other_bytes: int) -> dict[str, Any]:
    def step(form: str, efficiency: int, latency: int) -> float:
        other = other_bytes / (_CORES * TRAINIUM2.dma_bytes_a_second * efficiency / 100)
        of_layers: float = layer["layer_us"][form][str(efficiency)][str(latency)]
        return layers * of_layers * 1e-6 + other + _OTHER_COLLECTIVES * latency * 1e-6

    here = ASSUMED_EFFICIENCY, ASSUMED_LATENCY
    return {
        "kernels": layer["kernels"],
        "sbuf_bytes": layer["sbuf_bytes"],
        "collectives": layers * len(layer["kernels"]) + _OTHER_COLLECTIVES,
        "hbm_bytes": _CORES * layers * sum(kernel["hbm_bytes"] for kernel in layer["kernels"]) + other_bytes,
        "tpot": {"kernels_in_turn": step("kernels_in_turn", *here), "one_kernel": step("one_kernel", *here)},
        "sensitivity": {e: {t: step("one_kernel", e, t) for t in LATENCIES} for e in EFFICIENCIES},
    }


def print_kernel_step(step: dict[str, Any], console: Console) -> None:
    """Tables: the kernels of a layer, the step, and its sensitivity."""
    engines = ("dma", "tensor", "vector", "scalar", "gpsimd")
    for slots, one in step["contexts"].items():
        title = f"NKI kernels of a layer, one token, {int(slots):,} slots; modelled, per core of LNC=2"
        table = Table("kernel", "MB", *(f"{e} us" for e in engines), "span us", "collective before", title=title)
        for kernel in one["kernels"]:
            times = (f"{kernel['busy_us'].get(engine, 0):.1f}" for engine in engines)
            megabytes = f"{kernel['hbm_bytes'] / 1e6:.2f}"
            table.add_row(kernel["kernel"], megabytes, *times, f"{kernel['span_us']:.1f}", kernel["collective_before"])
        console.print(table)
        tpot = one["tpot"]
        console.print(
            f"  a step, modelled: {one['hbm_bytes'] / 1e9:.2f} GB a rank, {one['collectives']} collectives; TPOT"
            f" {tpot['kernels_in_turn'] * 1e3:.2f} ms kernel by kernel, {tpot['one_kernel'] * 1e3:.2f} ms in one"
            f" kernel a layer ({one['sbuf_bytes'] / 1024:.0f} KiB of SBUF a partition)",
            highlight=False,
        )
    table = Table(
        "slots", "DMA %", *(f"{latency} us" for latency in LATENCIES), title="TPOT, ms, by collective latency"
    )
    for slots, one in step["contexts"].items():
        for efficiency, row in one["sensitivity"].items():
            table.add_row(f"{int(slots):,}", f"{efficiency}", *(f"{time * 1e3:.2f}" for time in row.values()))
    console.print(table)
    for line in step["assumptions"]:
        console.print(f"  {line}", style="dim", highlight=False)
