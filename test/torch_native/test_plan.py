"""The planner's step on the torch-native line beside captured graphs of the model, at real widths without memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import line
import numpy as np
import pytest
import torch
from kernel_calls import CallCost, cost_of
from lowering import Captured, name_of, written_by
from torch.fx import GraphModule
from torch.utils.flop_counter import FlopCounterMode

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.cost import Collective, decode_counts, prefill_counts
from kimi_k2.plan.deployment import Target, load_target
from kimi_k2.plan.memory import local_bytes
from nki_emulator.dtypes import NUMPY

PRESETS = [
    "trn2-native-tp4-ep16",
    "trn2-native-tp4-ep16+fp8",
    "trn2-native-tp32-ep2",
    "trn2-native-tp32-ep2-nki-layers",
]
CONFIG = KimiK2Config.from_preset("kimi-k2-instruct-0905", num_hidden_layers=3)


@functools.cache
def target_of(preset: str) -> Target:
    name, _, fp8 = preset.partition("+")
    target = replace(load_target(name, CONFIG), prompt=2048)
    assert target.torch_native is not None
    line = target.torch_native.model_copy(update={"kv_cache_dtype": "fp8" if fp8 else "auto"})
    return replace(target, torch_native=line)


@functools.cache
def captured(preset: str, tokens: int, lines: int, slots: int, kernels: bool = False) -> GraphModule:
    """One bucket's graph, a rank's as good as another's: a dense layer and two MoE layers."""
    runner = line.on_meta(CONFIG, target_of(preset), rank=37)
    runner.width = slots // runner.block
    with torch.device("meta"):
        named = runner.inputs([], [0] * tokens, [0] * tokens, [0] * tokens, [0] * lines, tokens // lines)
    return Captured.of_call(runner.model, named, ()).graph


def largest(preset: str, decode: bool) -> tuple[int, int, int]:
    """Tokens, lines and slots of the largest step, or prompt."""
    target = target_of(preset)
    return (target.batch if decode else target.prompt, target.batch if decode else 1, target.context)


def costs_of(graph: GraphModule) -> Iterator[CallCost]:
    """Of the kernels of whole layers in a graph, one after the other."""
    for node in graph.graph.nodes:
        if name_of(node) == "line.decode_layer":
            cores, tensors, named, numbers, others = node.args
            like = [tensor.meta["example_value"] for tensor in tensors]
            arrays = [
                np.zeros(tensor.shape, NUMPY[str(tensor.dtype).split(".")[1].removesuffix("fn")]) for tensor in like
            ]
            held = dict(zip(named.split(","), arrays, strict=True))
            yield cost_of("decode_layer", cores, held, line.numbers_of(numbers, others))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("decode", [True, False])
def test_a_step_is_what_the_model_does(preset: str, decode: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations, collectives, writes, and bytes held; where kernels may run, one a layer moves new rows."""
    target = target_of(preset)
    whole = decode and target.layout.layers
    if whole:
        line.put(monkeypatch, line.stand_ins(kernels=True))
    graph = captured(preset, *largest(preset, decode), kernels=whole)
    assert sum(len(written_by(node)) for node in graph.graph.nodes) == 2 * CONFIG.num_hidden_layers
    planned = (decode_counts if decode else prefill_counts)(target)
    collectives = Counter(
        Collective(str(node.args[1]), target.layout.ranks, node.meta["example_value"].nbytes)
        for node in graph.graph.nodes
        if name_of(node) == "line.collective"
    )
    if whole:
        for layer, cost in enumerate(costs_of(graph), CONFIG.first_k_dense_replace):
            collectives.update(Collective(*collective) for collective in cost.collectives)
            parts = (size for name, size in planned.read.items() if name.startswith(f"layers.{layer}."))
            outside = sum(
                planned.read.get(f"layers.{layer}.{name}.weight", 0)
                for name in ("self_attn.qkv_a_proj", "input_layernorm")
            )
            read = sum(parts) - outside + planned.read["cache"] // CONFIG.num_hidden_layers
            assert sum(cost.read) == pytest.approx(read, rel=0.01)
    else:
        inputs = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        with FlopCounterMode(display=False) as flops:
            graph(*[torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for tensor in inputs])
        assert planned.flops == pytest.approx(flops.get_total_flops(), rel=1e-3)
    assert planned.collectives == collectives
    runner = line.on_meta(CONFIG, target)
    held = sum(parameter.nbytes for parameter in runner.model.parameters())
    assert held == sum(map(local_bytes, target.sharding.tensors))
    slots = 256 * runner.block  # of each page of the runner
    pages = sum(half.nbytes for halves in runner.pages.values() for half in halves)
    assert planned.held["cache"] == pages // slots * target.batch * target.context
    line.put(monkeypatch, line.stand_ins(kernels=True))
    graph = captured(preset, *largest(preset, decode), kernels=True)
    writes = [node for node in graph.graph.nodes if written_by(node)]
    assert {name_of(node) for node in writes} == {"line.write_pages"}
    assert planned.moved["cache write"] == 2 * sum(node.args[2].meta["example_value"].nbytes for node in writes)
