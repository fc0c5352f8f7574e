"""Lowers one graph at Kimi-K2's real shapes (fewer layers) and prints its counts as JSON.

python lowering_worker.py PRESET LAYERS STAGE [all-experts | MEMBER]
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from typing import Any

os.environ["PJRT_DEVICE"] = "CPU"
os.environ.pop("NXD_CPU_MODE", None)

import environment

environment.prepare(cpu=False)

from hlo import count, entry_instructions, is_parameter, kernel_cost, peak_live_bytes, summary  # noqa: E402
from kernel_calls import kernel_name  # noqa: E402

from kimi_k2.config import KimiK2Config  # noqa: E402
from kimi_k2.neuron import contrib  # noqa: E402
from kimi_k2.neuron.compile import build_application  # noqa: E402
from kimi_k2.plan.cost import decode_counts, prefill_counts  # noqa: E402
from kimi_k2.plan.deployment import STAGES, Deployment  # noqa: E402
from kimi_k2.plan.memory import live_bytes  # noqa: E402
from kimi_k2.plan.target import make_target  # noqa: E402
from kimi_k2.sharding.plan import make_plan  # noqa: E402


def of_experts(graph: Any) -> list[dict[str, Any]]:
    """What the routed experts' weights become, up to and with the products that they go into, in order."""
    instructions = list(entry_instructions(graph.hlo))
    users = Counter(operand for one in instructions for operand in one.operands)
    weights = {str(n) for n, name in graph.parameters.items() if ".mlp.experts." in name and name.endswith("weight")}
    seen = {one.name for one in instructions if one.op == "parameter" and one.operands[0] in weights}
    found = []
    for one in instructions:
        if one.op != "parameter" and seen.intersection(one.operands):
            if one.op != "dot":
                seen.add(one.name)
            if len(one.shapes) > 1:  # a kernel's results
                continue
            (shape,) = one.shapes
            found.append({"op": one.op, "type": shape.dtype, "shape": list(shape.dims), "users": users[one.name]})
    return found


def fetches(text: str) -> list[dict[str, Any]]:
    """Bytes that each call of a kernel of ours reads from HBM, in order.

    `ahead`: of parameters, at addresses that are known before the step: such reads (weights, the cache) can be under
    way while a collective is. `chosen`: of parameters, through a run-time index (the experts that the router chose).
    `computed`: of what the step computes.
    """
    instructions = {one.name: one for one in entry_instructions(text)}
    found = []
    for one in instructions.values():
        if one.op != "custom-call" or (cost := kernel_cost(one, instructions)) is None:
            continue
        bytes_read = {"ahead": 0, "chosen": 0, "computed": 0}
        for operand, size, indexed in zip(one.operands, cost.read, cost.indexed, strict=True):
            if is_parameter(operand, instructions):
                bytes_read["ahead"] += size - indexed
                bytes_read["chosen"] += indexed
            else:
                bytes_read["computed"] += size
        found.append({"kernel": kernel_name(one.attributes) or "", **bytes_read})
    return found


def main() -> None:
    name, layers, stage, *path = sys.argv[1:]
    preset = Deployment.load(name)
    member = path[0] if path and path[0].startswith("kimi") else "kimi-k2-instruct-0905"
    config = KimiK2Config.from_preset(member, num_hidden_layers=int(layers))
    if path == ["all-experts"]:
        experts = contrib.load("experts").KimiK2ExpertMLPs
        # Upstream's only path that runs with expert parallelism.
        experts.forward_selective = experts.forward_all_experts_EP
    app = build_application(preset, config, member, disable_argmax_kernel=True)
    graph = contrib.load("lowering").lower(app, stage)
    counts = count(graph.hlo, graph.parameters)
    kinds = {f"{one.kind} {one.ranks}": times for one, times in counts.collectives.items()}
    target = make_target(preset, config).with_lengths(None, None, graph.bucket if stage.startswith("context") else None)
    sharding = make_plan(config, target.layout)
    decode = stage.startswith("token")
    planned = (
        decode_counts(config, target, sharding, graph.bucket) if decode else prefill_counts(config, target, sharding)
    )
    live = dict(zip((*STAGES,), live_bytes(config, target), strict=True))[stage]
    calls = Counter(re.findall(r'custom_call_target="kimi_k2\.nki\.(\w+)"', graph.hlo))
    facts = {
        **summary(counts), "router_bytes_read": counts.bytes_read(r"router\."), "kinds": kinds,
        "operations": Counter(one.op for one in entry_instructions(graph.hlo)),
        "kernels": dict(calls), "fetches": fetches(graph.hlo),
        "of_experts": of_experts(graph), "planned": summary(planned),
        "live": peak_live_bytes(graph.hlo).nbytes, "planned_live": live,
    }  # fmt: skip
    print("COUNTS " + json.dumps(facts))


if __name__ == "__main__":
    main()
