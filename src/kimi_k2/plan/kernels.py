"""A decode step on our NKI kernels: stored counts of one layer, collectives, and the rest of the step. Modelled.

The counts come from the emulator (`python -m kimi_k2.nki.step_counts`); a test holds them to the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from kimi_k2.files import Json
from kimi_k2.nki.step_counts import EFFICIENCIES, LATENCIES, stored
from kimi_k2.nki.step_sizes import HIDDEN
from kimi_k2.plan.cost import GraphCounts, roofline
from kimi_k2.plan.deployment import Target
from kimi_k2.plan.machines import TRN2_LNC2, Machine
from kimi_k2.plan.memory import FLOAT32, between, local_bytes
from kimi_k2.plan.published import data, source_words
from nki_emulator.rates import TRAINIUM2

ASSUMED_EFFICIENCY, ASSUMED_LATENCY = 80.0, 15.0  # percent of the DMA engines' peak; microseconds of a collective
_OTHER_COLLECTIVES = 5  # of the embedding, the down projections of the first two layers, and sampling
_CORES = 2
ASSUMPTIONS = (
    "modelled, not measured; nothing here has run on Trainium",
    "engines by published rates, in the kernels' order, without semaphores; launches are not counted",
    "DMA at {efficiency:.0f} % of 368 GB/s a core ({efficiency_from}), shared by its rings, 512 bytes' worth a"
    " descriptor, 1.3 us from trigger to data",
    "a collective takes {latency:.1f} us ({latency_from}), whatever its size, and takes nothing from the DMA engines;"
    " all cores and ranks arrive together",
    "routed experts in FP8 with scales of 128 x 128, attention in BF16",
    "131,072 tokens: the cache over groups of 16 ranks; at EP2 a rank holds 4 of 8 experts, in one kernel a layer the"
    " slowest 5",
    "the dense layer's MLP and the head by their bytes alone; the dense layer's attention as another layer's",
)

_FORMS = {
    "folded": "one kernel a layer: q_a and kv_a ride in the all-reduce behind the experts too (early_qkv_a)",
    "folded_fp8": "one kernel a layer: the same with attention in FP8, by the checkpoint's scales",
    "folded_4": "one kernel a layer, 4 tokens of a sequence: at EP2 the slowest rank has 18 of the 32 experts (expected"
    " 18.2 of uniform routing)",
    "apart": "one kernel a layer, a call each, over pages: no load runs ahead of a call",
    "apart_4": "one kernel a layer, a call each, over pages, 4 tokens of a sequence",
}
_OF_THE_CLASS = (
    "this is the step of the class, which runs its MoE layers so (decode: layers): with the whole cache on each"
    " rank, and with flash decoding over groups of 16"
)


class Rates(NamedTuple):
    """DMA in percent of the engines' peak, a collective in microseconds, and where each is from."""

    efficiency: float = ASSUMED_EFFICIENCY
    latency: float = ASSUMED_LATENCY
    efficiency_from: str = "assumed"
    latency_from: str = "assumed, docs/nki.md quotes what is published"

    @classmethod
    def of(cls, machine: Machine, layer_bytes: int) -> Rates:
        """Those of a machine; of its collectives that of a layer's all-reduce of so many bytes."""
        rates = cls()
        if machine.bytes_per_second < TRN2_LNC2.bytes_per_second:
            share = machine.bytes_per_second / (_CORES * TRAINIUM2.dma_bytes_a_second)
            rates = rates._replace(efficiency=100 * share, efficiency_from="measured")
        if machine.collectives:
            time = machine.seconds_of(layer_bytes) * 1e6
            rates = rates._replace(latency=time, latency_from=f"measured at {layer_bytes:,} bytes")
        return rates

    def rest(self, other_bytes: int, collectives: int) -> float:
        """Seconds of reads and collectives one after the other."""
        read = other_bytes / (_CORES * TRAINIUM2.dma_bytes_a_second * self.efficiency / 100)
        return read + collectives * self.latency * 1e-6

    def of_layer(self, times: dict[str, dict[str, float]]) -> float:
        """Seconds of a layer from its stored times.

        Linear in the latency and in the time of a byte between those that were counted; beyond, on from the last two.
        """
        rows = [between(LATENCIES, [times[str(e)][str(t)] for t in LATENCIES], self.latency) for e in EFFICIENCIES]
        per_byte = [-1 / e for e in EFFICIENCIES]
        return between(per_byte, rows, -1 / self.efficiency) * 1e-6


def kernel_step(target: Target) -> Json | None:
    """Times of one token, by context, and which is nearest; None for a deployment whose kernels were not counted.

    Seconds are modelled: `tpot` at the machine's DMA efficiency and latency, `range` at latencies that were published.
    """
    config, layout = target.config, target.layout
    counted = stored()["presets"].get(f"trn2-tp{layout.moe_tp}-ep{layout.moe_ep}", {})
    if config.hidden_size != HIDDEN or target.batch != 1:
        return None
    form = "folded_fp8" if layout.attention_tiles(config) == "fp8" else "folded"
    form = "apart" if target.torch_native else form
    if target.positions > 1:
        form += f"_{target.positions}"
    if form not in counted:
        return None
    others = (tensor for tensor in target.sharding.tensors if tensor.name.startswith(("lm_head.", "layers.0.mlp.")))
    other_bytes = sum(map(local_bytes, others))
    layers = config.num_hidden_layers
    rates = Rates.of(target.machine, _CORES * target.rows * (HIDDEN + config.n_routed_experts) * FLOAT32)
    contexts = {slots: _context(layer, layers, other_bytes, rates) for slots, layer in counted[form].items()}
    return {
        "form": form,
        "assumptions": [
            *(line.format(**rates._asdict()) for line in ASSUMPTIONS),
            _FORMS[form],
            *([] if target.torch_native else [_OF_THE_CLASS]),
        ],
        "other_bytes": other_bytes,
        "rates": rates._asdict(),
        "contexts": contexts,
        "nearest": min(contexts, key=lambda slots: abs(int(slots) - target.context)),
    }


def step_bound(target: Target, decode: GraphCounts) -> tuple[float, str, Json | None]:
    """Seconds of a step in the deployed form, what they are of, and where these are kernels `kernel_step`."""
    kernels = kernel_step(target) if target.layout.layers else None
    if kernels is None:
        return (
            roofline(decode, target.machine).bound,
            "bytes and collectives at peak rates, no real run is as fast",
            None,
        )
    slots = kernels["nearest"]
    words = f"our kernels instruction by instruction, {int(slots):,} tokens"
    return kernels["contexts"][slots]["tpot"], words, kernels


def _context(layer: Json, layers: int, other_bytes: int, rates: Rates) -> Json:
    others = _OTHER_COLLECTIVES

    def step(rates: Rates) -> float:
        return layers * rates.of_layer(layer["layer_us"]) + rates.rest(other_bytes, others)

    collectives = layers * layer["collectives"]
    alone = step(rates._replace(latency=0.0))  # weights load while nothing is exchanged
    reported = data()["collective"]
    latencies: list[Json] = [
        {"seconds": ASSUMED_LATENCY * 1e-6, "what": "assumed"}, reported, reported["slowest"],
    ]  # fmt: skip
    return {
        "layer": layer,
        "collectives": collectives + others,
        "hbm_bytes": _CORES * layers * layer["hbm_bytes"] + other_bytes,
        "rest": rates.rest(other_bytes, others),
        "tpot": step(rates),
        "range": [
            {
                "latency": latency["seconds"],
                "tpot": step(rates._replace(latency=latency["seconds"] * 1e6)),
                "charged": alone + (collectives + others) * latency["seconds"],
                "source": latency["what"] + (f" ({source_words(latency['source'])})" if "source" in latency else ""),
            }
            for latency in latencies
        ],
    }


def print_kernel_step(step: Json, console: Console) -> None:
    """At the counted context that is nearest: what a layer's time goes to, the step, and its sensitivity."""
    found = step["contexts"][step["nearest"]]
    _print_path(int(step["nearest"]), found, console)
    console.print(
        f"  a step, modelled, {_FORMS[step['form']].partition(':')[0]}: {found['hbm_bytes'] / 1e9:.2f} GB a rank,"
        f" {found['collectives']} collectives; TPOT {found['tpot'] * 1e3:.2f} ms",
    )
    table = Table("a collective", "TPOT, ms", "weights wait for it", "by", title="TPOT by collectives; modelled")
    for row in found["range"]:
        times = (f"{row[name] * 1e3:.2f}" for name in ("tpot", "charged"))
        table.add_row(f"{row['latency'] * 1e6:.0f} us", *times, row["source"])
    console.print(table)
    for line in step["assumptions"]:
        console.print(f"  {line}", style="dim")


def _print_path(slots: int, found: Json, console: Console) -> None:
    """Where the time of a whole-layer kernel goes: engines on the critical path beside how long each is busy."""
    layer = found["layer"]
    title = f"one NKI kernel a layer, {slots:,} slots: us a layer; modelled, per core, at 15 us a collective, DMA 80 %"
    table = Table("", "critical path", "busy", title=title)
    for name, time in sorted(layer["path_us"].items(), key=lambda item: -item[1]):
        busy = layer["busy_us"].get(name)
        table.add_row(name, f"{time:.1f}", "" if busy is None else f"{busy:.1f}")
    table.add_row("all", f"{sum(layer['path_us'].values()):.1f}", "")
    console.print(table)
    stages = zip(layer["collectives_in_order"], layer["stages_us"], strict=True)
    for name, time in stages:
        console.print(f"  {time:.1f} us to the end of the {name}")
    console.print(
        f"  SBUF: {layer['sbuf_bytes'] / 1024:.0f} of 224 KiB a partition; head, dense MLP and the other collectives:"
        f" {found['rest'] * 1e3:.2f} ms a step",
    )
