"""Graphs at Kimi-K2's real shapes with fewer layers, lowered in a process of their own; what is counted in them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from applications import of_options
from harness import launch
from hlo import count, entry_instructions, is_parameter, kernel_cost, peak_live_bytes, stale_readers, summary
from kernel_calls import kernel_name

from kimi_k2.config import KimiK2Config, raw_preset
from kimi_k2.neuron import contrib
from kimi_k2.plan.cost import decode_counts, prefill_counts
from kimi_k2.plan.deployment import STAGES, Deployment, make_target
from kimi_k2.plan.memory import live_bytes

DECODE, PREFILL, DRAFTED = "token_generation_model", "context_encoding_model", "fused_speculation_model"
MEMBER = "kimi-k2-instruct-0905"


def _lowered(app: Any, stages: Sequence[str]) -> list[Any]:
    """Graphs without what the text tells already."""
    return [replace(contrib.load("lowering").lower(app, stage), proto=b"") for stage in stages]


def of_preset(name: str, member: str, layers: int, stages: Sequence[str], draft: Path | None, drafts: int) -> list[Any]:
    """A job: graphs of a preset, with a draft in them."""
    from kimi_k2.neuron.compile import build_application
    from kimi_k2.plan.nxdi import draft_options

    preset = Deployment.load(name)
    options = draft_options(drafts) if draft else {}
    config = KimiK2Config.from_preset(member, num_hidden_layers=layers)
    app = build_application(preset, config, member, draft=draft, disable_argmax_kernel=True, **options)
    return _lowered(app, stages)


def of_folder(tp: int, ep: int, quantized: bool) -> list[Any]:
    """A job: both graphs of the folder of contrib/models, two layers, 512 tokens of prompt and 1,024 in all."""
    options = {"tp_degree": tp * ep, "moe_tp_degree": tp, "moe_ep_degree": ep, "quantized": quantized}
    options |= {"seq_len": 1024, "max_context_length": 512}
    raw = {**raw_preset(), "num_hidden_layers": 2}
    return _lowered(of_options("none", raw, options, "kimi_k2.contrib_model"), STAGES)


def of_media(patches: int, frames: int, ranks: int, stages: Sequence[str]) -> list[Any]:
    """A job: graphs of K2.5 with two layers and its whole tower, of which a bucket is compiled for so many ranks."""
    from kimi_k2.neuron.compile import build_application

    preset = Deployment.load("trn2-tp64-ep1-images")
    assert preset.vision is not None
    tower = preset.vision.model_copy(update={"tp_degree": ranks, "buckets": ((patches, frames),)})
    config = KimiK2Config.from_preset("kimi-k2.5", num_hidden_layers=2)
    preset = preset.model_copy(update={"vision": tower})
    return _lowered(build_application(preset, config, "kimi-k2.5", disable_argmax_kernel=True), stages)


def graph_of(
    preset: str, stage: str, layers: int = 2, member: str = MEMBER, draft: Path | None = None, drafts: int = 0,
) -> Any:  # fmt: skip
    """One graph of a preset, whose caches are read and written in order."""
    graph = launch(of_preset, preset, member, layers, [stage], draft, drafts, way="lowered")[0]
    said = stale(graph)
    assert not said, said
    return graph


def stale(graph: Any) -> list[str]:
    """See `stale_readers`."""
    numbers = {name: number for number, name in graph.parameters.items()}
    return stale_readers(graph.hlo, {name: (numbers[name], output) for name, output in graph.aliases.items()})


def kernels(graph: Any) -> dict[str, int]:
    """How often each kernel of ours is called."""
    return dict(Counter(re.findall(r'custom_call_target="kimi_k2\.nki\.(\w+)"', graph.hlo)))


def counted(graph: Any) -> dict[str, Any]:
    """What a graph reads, computes and sends, and how much is alive at once."""
    counts = count(graph.hlo, graph.parameters)
    return {**summary(counts), "counts": counts, "live": peak_live_bytes(graph.hlo)}


def planned(preset: str, graph: Any, layers: int = 2, member: str = MEMBER) -> dict[str, Any]:
    """The same of the plan."""
    config = KimiK2Config.from_preset(member, num_hidden_layers=layers)
    prompt = graph.bucket if graph.stage == PREFILL else None
    target = make_target(Deployment.load(preset), config).with_lengths(None, None, prompt)
    plan = prefill_counts(target) if prompt else decode_counts(target, graph.bucket)
    live = dict(zip((*STAGES,), live_bytes(target), strict=True))[graph.stage]
    return {**summary(plan), "live": live}


def of_experts(graph: Any) -> list[dict[str, Any]]:
    """What the routed experts' weights become, up to and with the products that they go into, in order."""
    instructions = list(entry_instructions(graph.hlo))
    users = Counter(operand for instruction in instructions for operand in instruction.operands)
    weights = {str(n) for n, name in graph.parameters.items() if ".mlp.experts." in name and name.endswith("weight")}
    seen = {
        instruction.name
        for instruction in instructions
        if instruction.op == "parameter" and instruction.operands[0] in weights
    }
    found = []
    for instruction in instructions:
        if instruction.op != "parameter" and seen.intersection(instruction.operands):
            if instruction.op != "dot":
                seen.add(instruction.name)
            if len(instruction.shapes) == 1:  # else a kernel's results
                (shape,) = instruction.shapes
                found.append(
                    {
                        "op": instruction.op,
                        "type": shape.dtype,
                        "shape": list(shape.dims),
                        "users": users[instruction.name],
                    }
                )
    return found


def fetches(graph: Any) -> dict[str, int]:
    """Bytes that the first call of a kernel of ours reads from HBM.

    `ahead`: of parameters, at addresses that are known before the step: such reads (weights, the cache) can be under
    way while a collective is. `chosen`: of parameters, through a run-time index (the experts that the router chose).
    `computed`: of what the step computes.
    """
    instructions = {instruction.name: instruction for instruction in entry_instructions(graph.hlo)}
    calls = [
        instruction
        for instruction in instructions.values()
        if instruction.op == "custom-call" and kernel_name(instruction.attributes)
    ]
    call = next(call for call in calls if kernel_cost(call, instructions) is not None)
    cost = kernel_cost(call, instructions)
    assert cost is not None
    found = Counter[str]()
    for operand, size, indexed in zip(call.operands, cost.read, cost.indexed, strict=True):
        if is_parameter(operand, instructions):
            found["ahead"] += size - indexed
            found["chosen"] += indexed
        else:
            found["computed"] += size
    return dict(found)
